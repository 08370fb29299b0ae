"""Which format a checkpoint has its matrices in: the choice that a model's config carries.

A model is built from dense matrices, which are shapes without memory; then each `Linear` asks the
formats of its config what to store instead (`store_matrices`). Families know nothing of formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.lent_memory import empty
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.weights import Weight


class MatrixFormat(Protocol):
    """A way to store matrices. Two that are equal may be stored as one, one below the other."""

    def matrix(self, out_features: int, in_features: int) -> Matrix: ...


@runtime_checkable
class Joined(Protocol):
    """A format of which not all matrices can be stored as one, even where it is the same."""

    def joins(self, sizes: Sequence[int]) -> bool:
        """Whether matrices of so many rows can."""
        ...


@dataclass(frozen=True)
class Dense:
    """The numbers themselves, in the type that the model computes in."""

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return DenseMatrix(out_features, in_features)


class MatrixFormats(Protocol):
    """Which format a checkpoint has each of its matrices in. It is part of a model's config, so it
    can be compared, hashed and pickled."""

    def of(self, *names: str) -> MatrixFormat:
        """That of a layer, which the checkpoint calls by one of these names; its tensors add their
        endings (`.weight`)."""
        ...


@dataclass(frozen=True)
class AllDense:
    """A checkpoint without quantised matrices."""

    def of(self, *names: str) -> MatrixFormat:
        return Dense()


def stacked(formats: Sequence[MatrixFormat], sizes: Sequence[int], in_features: int) -> Matrix:
    """Matrices one below the other, of `sizes` rows each: neighbours of the same format are one."""
    matrices: list[Matrix] = []
    pairs = zip(formats, sizes, strict=True)
    for shared, run in groupby(pairs, key=itemgetter(0)):
        rows = [size for _, size in run]
        if not isinstance(shared, Joined) or shared.joins(rows):
            rows = [sum(rows)]
        matrices += [shared.matrix(count, in_features) for count in rows]
    return matrices[0] if len(matrices) == 1 else StackedMatrix(matrices)


class StackedMatrix(Matrix):
    """Matrices of different formats, one below the other, over the same input."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        super().__init__()
        self._stack = nn.ModuleList(parts)
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features

    @property
    def format_name(self) -> str:
        return ", ".join(part.format_name for part in self.parts)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        if x.is_cuda and not all(part.fills_columns for part in self.parts):
            pairs = zip(self.parts, biases, strict=True)
            return torch.cat([part.multiply(x, added) for part, added in pairs], dim=-1)
        shape = len(x), self.out_features
        out = empty(shape, x.dtype) if x.device.type == "cpu" else x.new_empty(shape)
        for part, added, columns in zip(self.parts, biases, out.split(sizes, dim=1), strict=True):
            part.multiply_into(x, added, columns)
        return out

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        return backend.act_and_mul(self.multiply(x, bias), activation)

    def part(self, rows: range) -> Matrix:
        found, above = [], 0
        for each in self.parts:
            own = range(each.out_features)[max(0, rows.start - above) : max(0, rows.stop - above)]
            if own:
                found.append(each if len(own) == each.out_features else each.part(own))
            above += each.out_features
        return found[0] if len(found) == 1 else StackedMatrix(found)

    def pack(self) -> None:
        for part in self.parts:
            part.pack()

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        """`rows` are those of one part, or lie in one."""
        above = 0
        for part in self.parts:
            if above <= rows.start < above + part.out_features:
                yield from part.weights(whole, slice(rows.start - above, rows.stop - above))
            above += part.out_features
