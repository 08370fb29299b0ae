"""An adapter in host memory, laid out as slots hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from quire.layers.adapters.vocabulary import VocabularyAdapter
from quire.layers.low_rank import LowRank

ALIGNMENT = 64  # bytes, of tensors in one piece of memory
Outputs = Sequence[LowRank | None]  # what an adapter adds to each output of a layer


@dataclass(frozen=True, eq=False)
class MatrixImage:
    """Of one matrix: two pieces of memory, each copied at once, and a bias if there is one.

    Of one that experts have, each begins with a dimension of experts.
    """

    a: Tensor  # [ranks of all outputs, inputs], one output's below the other's
    b: Tensor  # [largest rank, features of all outputs], zeros where an output has less
    bias: Tensor | None  # [features of all outputs]
    ranks: tuple[int, ...]  # of the outputs

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.a, self.b)
        if self.bias is not None:
            yield self.bias

    def moved(self, move: Callable[[Tensor], Tensor]) -> MatrixImage:
        """The same, its tensors somewhere else."""
        bias = None if self.bias is None else move(self.bias)
        return replace(self, a=move(self.a), b=move(self.b), bias=bias)


@dataclass(frozen=True, eq=False)
class AdapterImage:
    """Of all that an adapter changes in a model."""

    table: Tensor  # int32: how slots hold it, one matrix of the model behind the other
    matrices: Mapping[str, MatrixImage]  # by the path of the layer
    embedding: VocabularyAdapter | None
    head: VocabularyAdapter | None

    def for_slots(self) -> Iterator[Tensor]:
        """What is copied into a slot: all but the parts of embedding and head."""
        yield self.table
        for matrix in self.matrices.values():
            yield from matrix.tensors()

    @property
    def num_bytes(self) -> int:
        ends = [end.tensors() for end in (self.embedding, self.head) if end is not None]
        return sum(tensor.nbytes for tensor in chain(self.for_slots(), *ends))

    @property
    def packed_bytes(self) -> int:
        """What is for a slot, in one piece of memory."""
        return sum(_aligned(tensor.nbytes) for tensor in self.for_slots())

    def packed_in(self, room: Tensor) -> AdapterImage:
        """The same, where a piece of memory has what is for a slot, once it gets the numbers."""
        used = 0

        def place(tensor: Tensor) -> Tensor:
            nonlocal used
            there = room[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            used += _aligned(tensor.nbytes)
            return there

        table = place(self.table)
        matrices = {path: matrix.moved(place) for path, matrix in self.matrices.items()}
        return AdapterImage(table, matrices, self.embedding, self.head)

    def with_pinned_ends(self) -> AdapterImage:
        """The same, where a GPU copies the parts of embedding and head by itself."""
        ends = (self.embedding, self.head)
        moved = (None if end is None else end.moved(Tensor.pin_memory) for end in ends)
        return AdapterImage(self.table, self.matrices, *moved)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def matrix_image(
    outputs: Outputs,
    sizes: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
    experts: tuple[int, ...] = (),
) -> MatrixImage:
    """`sizes`: the features of each output; `experts`: how many have such a matrix."""
    ranks = tuple(0 if output is None else output.rank for output in outputs)
    a = torch.empty(*experts, sum(ranks), in_features, dtype=dtype)
    b = torch.zeros(*experts, max(ranks), sum(sizes), dtype=dtype)
    is_biased = any(output is not None and output.bias is not None for output in outputs)
    bias = torch.zeros(*experts, sum(sizes), dtype=dtype) if is_biased else None
    row = column = 0
    for output, features in zip(outputs, sizes, strict=True):
        if output is not None:
            columns, rank = slice(column, column + features), output.rank
            a[..., row : row + rank, :].copy_(output.a)
            b[..., :rank, columns].copy_(output.b.transpose(-2, -1))
            if bias is not None and output.bias is not None:
                bias[..., columns].copy_(output.bias)
            row += rank
        column += features
    return MatrixImage(a, b, bias, ranks)
