"""Tensors of a checkpoint that are a part of another one, its rows in another order, its bytes, its
transpose, or all of its numbers plus one number.

Like what they look into, they read only what is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.weights import ranges, span
from quire.models.checkpoints.lazy_tensor import LazyTensor, Slices


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a tensor that holds several, one below the other."""

    stored: LazyTensor
    start: int
    count: int

    @property
    def shape(self) -> Sequence[int]:
        return (self.count, *self.stored.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        rows = ranges(self.shape, part)[0]
        return self.stored[(slice(self.start + rows.start, self.start + rows.stop), *part[1:])]


@dataclass(frozen=True)
class Spare:
    """A tensor that a model may have a use for: it is no fault of a checkpoint if it has none."""

    stored: LazyTensor

    @property
    def shape(self) -> Sequence[int]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        return self.stored[part]


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of a tensor's rows."""

    stored: LazyTensor

    @property
    def shape(self) -> Sequence[int]:
        *others, columns = self.stored.shape
        return (*others, columns * self.stored.dtype.itemsize)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, part: Slices) -> Tensor:
        *others, columns = ranges(self.shape, part)
        size = self.stored.dtype.itemsize
        numbers = slice(columns.start // size, columns.stop // size)
        return self.stored[(*map(span, others), numbers)].contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Inner:
    """One of the tensors along the first dimension of another."""

    stored: LazyTensor
    index: int

    @property
    def shape(self) -> Sequence[int]:
        return tuple(self.stored.shape)[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        return self.stored[(slice(self.index, self.index + 1), *part)][0]


@dataclass(frozen=True)
class Transposed:
    """A matrix whose rows are the columns of another."""

    stored: LazyTensor

    @property
    def shape(self) -> Sequence[int]:
        return tuple(self.stored.shape)[::-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        rows, columns = ranges(self.shape, part)
        return self.stored[span(columns), span(rows)].T.contiguous()


@dataclass(frozen=True)
class OneRow:
    """A vector as a matrix of one row."""

    stored: LazyTensor

    @property
    def shape(self) -> Sequence[int]:
        return (1, *self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        rows = ranges(self.shape, part)[0]
        return self.stored[part[1:]].unsqueeze(0)[rows.start : rows.stop]


@dataclass(frozen=True)
class HeadsOfTwo:
    """Heads whose first rows are in one tensor, as columns, and whose others are in another."""

    first: LazyTensor  # [heads, columns, rows]
    second: LazyTensor  # [heads, rows, columns]

    @property
    def stored(self) -> LazyTensor:
        return self.first

    @property
    def shape(self) -> Sequence[int]:
        heads, columns, rows = self.first.shape
        return (heads * (rows + self.second.shape[1]), columns)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.first.dtype, self.second.dtype)

    def __getitem__(self, part: Slices) -> Tensor:
        rows, columns = ranges(self.shape, part)
        size = self.shape[0] // self.first.shape[0]
        heads = range(rows.start // size, -(-rows.stop // size))
        first = self.first[span(heads), span(columns)].transpose(1, 2)
        second = self.second[span(heads), slice(0, self.second.shape[1]), span(columns)]
        both = torch.cat((first.to(self.dtype), second.to(self.dtype)), dim=1).flatten(0, 1)
        start = heads.start * size
        return both[rows.start - start : rows.stop - start]


@dataclass(frozen=True)
class ReorderedRows:
    """A tensor whose rows have changed places within each head: `order` says which comes first."""

    stored: LazyTensor
    order: tuple[int, ...]

    @property
    def shape(self) -> Sequence[int]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        """Rows stay within their head, so whole heads are read."""
        head = len(self.order)
        rows = ranges(self.shape, part)[0]
        heads = slice(rows.start // head * head, -(-rows.stop // head) * head)
        stored = self.stored[(heads, *part[1:])]
        by_head: Tensor = stored.unflatten(0, (-1, head))
        ours = by_head[:, list(self.order)].flatten(0, 1)
        return ours[rows.start - heads.start : rows.stop - heads.start]


@dataclass(frozen=True)
class Shifted:
    """A tensor whose numbers are all stored `shift` too low; in float32, which takes the sums."""

    stored: LazyTensor
    shift: float

    @property
    def shape(self) -> Sequence[int]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __getitem__(self, part: Slices) -> Tensor:
        return self.stored[part].float() + self.shift
