"""An adapter in host memory, laid out as slots hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.adapters.vocabulary import VocabularyAdapter
from quire.layers.low_rank import LowRank

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

    matrices: Mapping[str, MatrixImage]  # by the path of the layer
    embedding: VocabularyAdapter | None
    head: VocabularyAdapter | None

    def tensors(self) -> Iterator[Tensor]:
        for part in (*self.matrices.values(), self.embedding, self.head):
            if part is not None:
                yield from part.tensors()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def pinned(self) -> AdapterImage:
        """The same in one piece of memory from which a GPU copies by itself."""
        room = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        used = 0

        def move(tensor: Tensor) -> Tensor:
            nonlocal used
            there = room[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            used += tensor.nbytes
            return there.copy_(tensor)

        return AdapterImage(
            {path: matrix.moved(move) for path, matrix in self.matrices.items()},
            None if self.embedding is None else self.embedding.moved(move),
            None if self.head is None else self.head.moved(move),
        )


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
