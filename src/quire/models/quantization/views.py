"""Tensors as methods store them, seen as Quire's matrices store them.

Like the tensors that they look into, these views read only what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.dequantise import pack_nibbles
from quire.layers.weights import ranges
from quire.models.checkpoints.json_fields import MOST_FEATURES
from quire.models.checkpoints.lazy_tensor import LazyTensor, Slices

WORD_BYTES = 4  # of the int32 that methods pack codes in
INDEX_DTYPES = (torch.int32, torch.int64)
MOST_ZEROS = 16 * MOST_FEATURES  # of a layer: one for each row and group
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word's nibbles is the first, second, … number's


@dataclass(frozen=True)
class AsBytes:
    """The bytes of a matrix of words: codes that lie along its rows, the lowest bits first.

    `width`: the bytes of a row, where its last word is filled up.
    """

    stored: LazyTensor
    width: int | None = None

    @property
    def shape(self) -> Sequence[int]:
        rows, words = self.stored.shape
        return (rows, words * WORD_BYTES if self.width is None else self.width)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, part: Slices) -> Tensor:
        rows, columns = ranges(self.shape, part)
        words = covering(columns, WORD_BYTES)
        found = self.stored[as_slice(rows), as_slice(words)].contiguous().view(torch.uint8)
        skipped = columns.start - words.start * WORD_BYTES
        return found[:, skipped : skipped + len(columns)]


@dataclass(frozen=True)
class UnpackedRows:
    """Words, each of which has the codes of several rows, seen as one code a byte.

    `order`: which of a word's codes is the first row's, the second's, …. `plus` is added to each
    code, which then wraps around.
    """

    stored: LazyTensor  # [rows / codes in a word, columns]
    num_rows: int
    bits: int
    order: tuple[int, ...] = ()
    plus: int = 0

    @property
    def shape(self) -> Sequence[int]:
        words, columns = self.stored.shape
        per_word = 32 // self.bits
        fits = words == -(-self.num_rows // per_word)
        return (self.num_rows if fits else words * per_word, columns)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, part: Slices) -> Tensor:
        rows, columns = ranges(self.shape, part)
        per_word = 32 // self.bits
        words = covering(rows, per_word)
        packed = self.stored[as_slice(words), as_slice(columns)]
        codes = torch.empty((len(packed), per_word, len(columns)), dtype=torch.uint8)
        for i, place in enumerate(self.order or range(per_word)):
            codes[:, i] = ((packed >> (place * self.bits)) + self.plus) & ((1 << self.bits) - 1)
        skipped = rows.start - words.start * per_word
        return codes.flatten(0, 1)[skipped : skipped + len(rows)]


@dataclass(frozen=True)
class PackedPairs:
    """Codes of four bits, one a byte, seen as two a byte."""

    stored: LazyTensor  # [rows, columns]

    @property
    def shape(self) -> Sequence[int]:
        rows, columns = self.stored.shape
        return (rows, columns // 2)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, part: Slices) -> Tensor:
        rows, columns = ranges(self.shape, part)
        both = slice(2 * columns.start, 2 * columns.stop)
        return pack_nibbles(self.stored[as_slice(rows), both])


@dataclass(frozen=True)
class Unsigned:
    """Signed codes of eight bits, seen as unsigned ones around 128."""

    stored: LazyTensor

    @property
    def shape(self) -> Sequence[int]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.stored.dtype == torch.int8 else self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        return self.stored[part].view(torch.uint8) ^ 128


@dataclass(frozen=True)
class RowScales:
    """A scale for each row, out of one for each row (in one dimension or two), or one for all."""

    stored: LazyTensor
    num_rows: int
    inverted: bool = False

    @property
    def shape(self) -> Sequence[int]:
        return (self.num_rows, 1)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        rows, columns = ranges(self.shape, part)
        found = whole(self.stored).flatten()
        if len(found) == 1:
            found = found.expand(self.num_rows)
        if self.inverted:
            found = found.float()
            # An infinite divisor would make all numbers zero; NaN is refused where it is placed.
            found = torch.where(found.isinf(), torch.nan, found.reciprocal())
        return found[as_slice(rows), None][:, : len(columns)]


@dataclass(frozen=True)
class Flattened:
    """A tensor whose last dimensions are one."""

    stored: LazyTensor
    kept: int  # dimensions that stay

    @property
    def shape(self) -> Sequence[int]:
        shape = tuple(self.stored.shape)
        return (*shape[: self.kept], math.prod(shape[self.kept :]))

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, part: Slices) -> Tensor:
        last = ranges(self.shape, part)[-1]
        return self.stored[part[: self.kept]].flatten(self.kept)[..., last.start : last.stop]


def row_scales(stored: LazyTensor, num_rows: int, inverted: bool = False) -> LazyTensor:
    """Scales by row, however they are stored; any others as they are."""
    is_one = math.prod(stored.shape) == 1
    by_row = tuple(stored.shape) in ((num_rows,), (num_rows, 1))
    return RowScales(stored, num_rows, inverted) if is_one or by_row else stored


def whole(stored: LazyTensor) -> Tensor:
    """All of a small tensor; those without a dimension, too."""
    return stored[()]


def is_zero(stored: LazyTensor) -> bool:
    """Whether all of a tensor is; one beyond any layer's zeros or biases is not read."""
    return math.prod(stored.shape) <= MOST_ZEROS and not bool(whole(stored).float().any())


def is_in_order(index: LazyTensor, group: int | None) -> bool:
    """Whether the groups of inputs are runs of so many, or all one: then the index says nothing."""
    is_index = len(index.shape) == 1 and index.dtype in INDEX_DTYPES
    if not is_index or index.shape[0] > MOST_FEATURES:
        return False  # and does not fit the layer, which is said when it is loaded
    return torch.equal(whole(index), runs(index.shape[0], group, index.dtype))


@lru_cache(maxsize=16)  # a model has one for each of tens of thousands of experts' matrices
def runs(inputs: int, group: int | None, dtype: torch.dtype) -> Tensor:
    """The group of each input, where groups are in order."""
    return (torch.arange(inputs) // (group or max(1, inputs))).to(dtype)


def check_unneeded(stored: LazyTensor, name: str) -> None:
    """Read scales that are not needed: they have to be those of a tensor, its rows, or heads."""
    size = math.prod(stored.shape)
    is_flat = len(stored.shape) <= 2 or size == max(stored.shape)
    is_kind = stored.dtype.is_floating_point or not name.endswith("scale")  # a zero may be whole
    if not 0 < size <= MOST_FEATURES or not is_flat or not is_kind:
        raise ModelError(f"{name} is not the scales that its name says: download the model again.")
    if not bool(whole(stored).float().isfinite().all()):
        raise ModelError(f"{name} has scales that are no finite numbers: download the model again.")


def covering(part: range, size: int) -> range:
    """The words of `size` elements that hold a part."""
    return range(part.start // size, -(-part.stop // size))


def as_slice(part: range) -> slice:
    return slice(part.start, part.stop)
