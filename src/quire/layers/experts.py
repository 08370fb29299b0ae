"""The experts of a layer: many small MLPs, of which each token goes through a few.

All of them are one matrix for each of the two products, one below the other:

    gate_up   [experts * 2 * features, hidden]     gate 0, up 0, gate 1, up 1, …
    down      [experts * hidden, features]         down 0, down 1, …

So every format that matrices have is one that experts have. Checkpoints may have gate and up of an
expert in one tensor, whose rows lie below each other or take turns; in memory they lie as above.
Ranks share experts as they share any MLP, by features, or with expert parallelism each has some of
the experts whole. Either way a rank's sum is a partial one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor

from quire.errors import ModelError
from quire.kernels.activation import Activation, Gating
from quire.kernels.backend import Backend
from quire.kernels.experts import (
    ExpertAdapters,
    ExpertMatrices,
    ExpertMLPs,
    RouterProducts,
    Routing,
    SharedExperts,
)
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.formats import MatrixFormat, MatrixFormats, stacked
from quire.layers.linear import MatrixLayer
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.tp import TensorParallel
from quire.layers.weights import NOWHERE, Fused, TensorPlace, Weight, parameter, span


@dataclass(frozen=True)
class ExpertNames:
    """What checkpoints call the matrices of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"  # of the first two in one
    interleaved: bool = False  # whose rows take turns, then


USUAL_NAMES = ExpertNames()


class Experts(MatrixLayer):
    def __init__(
        self,
        hidden_size: int,
        features: int,
        count: int,
        tp: TensorParallel,
        names: ExpertNames = USUAL_NAMES,
        activation: Gating = Activation.SILU,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size, self.features, self.count = hidden_size, features, count
        self.names, self.activation = names, activation
        if tp.expert_parallel:
            self.mine, self.part = tp.split(count, "experts"), range(features)
        else:
            self.mine, self.part = range(count), tp.split(features, "features of an expert")
        self.gate_up: Matrix = DenseMatrix(2 * len(self.mine) * len(self.part), hidden_size)
        self.down: Matrix = DenseMatrix(len(self.mine) * hidden_size, len(self.part))
        self.gate_up_bias = parameter(len(self.mine), 2 * len(self.part)) if bias else None
        self.down_bias = parameter(len(self.mine), hidden_size) if bias else None
        # Where ranks share each expert, the sum over them must have it once.
        self.adds_down_bias = tp.expert_parallel or tp.rank == 0
        self.adapters: tuple[MatrixAdapters, MatrixAdapters] | None = None  # of the two products

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        backend: Backend,
        shared: SharedExperts | None = None,
    ) -> Tensor:
        """What this rank adds to the sum over its tokens' experts, and over shared ones."""
        if self.mine.start:
            routing = routing._replace(experts=routing.experts - self.mine.start)
        mlps = self.mlps if shared is None else replace(self.mlps, shared=shared)
        if self.adapters is not None:
            gate_up, down = self.adapters
            batch = gate_up.active.batch
            if batch is not None:
                adapters = ExpertAdapters(gate_up.slots, down.slots, batch)
                mlps = replace(mlps, adapters=adapters)
        return backend.experts(x, routing, mlps)

    def choosing(self, x: Tensor, products: RouterProducts, backend: Backend) -> Tensor | None:
        """The same, if this rank has all experts and the backend kernels that choose from them."""
        is_adapted = self.adapters is not None and self.adapters[0].active.batch is not None
        if is_adapted or len(self.mine) < self.count:
            return None
        return backend.choosing_experts(x, products, self.mlps)

    @cached_property
    def mlps(self) -> ExpertMLPs:
        """What a backend is told of them, once they have their memory."""
        of_gate_up, of_down = self.each
        gate_up = expert_matrices(self.gate_up, of_gate_up, self.gate_up_bias)
        down_bias = self.down_bias if self.adds_down_bias else None
        down = expert_matrices(self.down, of_down, down_bias)
        return ExpertMLPs(
            len(self.mine),
            gate_up,
            self.activation,
            down,
            own_tokens=self.gate_up.own_tokens,
        )

    @cached_property
    def each(self) -> tuple[Sequence[Matrix], Sequence[Matrix]]:
        """Each expert's matrices by themselves, in the memory of all."""
        return split(self.gate_up, len(self.mine)), split(self.down, len(self.mine))

    def store_in(self, formats: MatrixFormats, path: str) -> None:
        """All experts have the format of the first: a checkpoint with others does not fit."""
        gate, up, down = self._formats(formats, path, 0)
        count, features = len(self.mine), len(self.part)
        self.gate_up = stacked([gate, up] * count, [features] * 2 * count, self.hidden_size)
        self.down = stacked([down] * count, [self.hidden_size] * count, features)

    def refuse_mixed(self, formats: MatrixFormats, path: str) -> None:
        """Of a checkpoint that does not fit, say so if experts have formats of their own."""
        first = self._formats(formats, path, 0)
        for expert in range(1, self.count):
            if self._formats(formats, path, expert) != first:
                raise ModelError(
                    f"{path}.{expert} is quantised in another way than {path}.0, and Quire reads "
                    f"layers whose experts all have one format: choose a model with those."
                )

    def _formats(self, formats: MatrixFormats, path: str, expert: int) -> list[MatrixFormat]:
        """Those of gate, up and down."""
        names = self.names
        each = (names.gate, names.gate_up), (names.up, names.gate_up), (names.down,)
        return [
            formats.of(
                *(f"{path}.{expert}.{name}" for name in called),
                *(f"{path}.{name}" for name in called),
            )
            for called in each
        ]

    def lay_out(self) -> None:
        """In the order of grouped products, or each by itself: its rows may end within a tile."""
        for whole, matrices in zip((self.gate_up, self.down), self.each, strict=True):
            if not whole.lay_out_experts(matrices):
                for matrix in matrices:
                    matrix.lay_out()

    def pack(self) -> None:
        for whole, matrices in zip((self.gate_up, self.down), self.each, strict=True):
            if not whole.pack_experts(len(matrices)):
                for matrix in matrices:
                    matrix.pack()

    def weights(self, path: str) -> Iterator[Weight]:
        for expert in range(self.count):
            of_expert = self._of_expert(f"{path}.{expert}", expert - self.mine.start)
            if expert in self.mine:
                yield from of_expert
            else:
                yield from map(held_elsewhere, of_expert)

    def _of_expert(self, path: str, index: int) -> Iterator[Weight]:
        """The tensors of one expert; of another rank's, with the places of one of ours."""
        index = index if index in range(len(self.mine)) else 0
        names, shape = self.names, (self.features, self.hidden_size)
        both, size = f"{path}.{names.gate_up}", len(self.part)
        for i, name in enumerate((names.gate, names.up)):
            start = i if names.interleaved else i * self.features
            fused = Fused(both, start, 2 * self.features, names.interleaved)
            whole = Weight(f"{path}.{name}", shape, part=(span(self.part),), fused=fused)
            yield from self.gate_up.weights(whole, rows_of(2 * index + i, size))
            if self.gate_up_bias is not None:
                place = TensorPlace(self.gate_up_bias[index, rows_of(i, size)])
                yield replace(whole, shape=shape[:1]).placed(place, ".bias")
        whole = Weight(f"{path}.{names.down}", shape[::-1], part=(slice(None), span(self.part)))
        yield from self.down.weights(whole, rows_of(index, self.hidden_size))
        if self.down_bias is not None:
            name, place = f"{path}.{names.down}.bias", TensorPlace(self.down_bias[index])
            yield Weight(name, shape[1:], place)


def split(matrix: Matrix, count: int) -> Sequence[Matrix]:
    """Matrices of one size that lie below each other."""
    size = matrix.out_features // count
    return [matrix.part(range(i * size, (i + 1) * size)) for i in range(count)]


def expert_matrices(
    whole: Matrix, matrices: Sequence[Matrix], bias: Tensor | None
) -> ExpertMatrices:
    count = len(matrices)
    numbers, packed = stacked_numbers(whole, count), whole.as_experts(count)
    return ExpertMatrices(
        partial(multiply, matrices, bias), numbers, bias, packed, whole.interleaved_experts
    )


def multiply(matrices: Sequence[Matrix], bias: Tensor | None, index: int, x: Tensor) -> Tensor:
    return matrices[index].multiply(x, None if bias is None else bias[index])


def stacked_numbers(matrix: Matrix, count: int) -> Tensor | None:
    """`[count, outputs, inputs]`, of one that is stored as numbers."""
    if not isinstance(matrix, DenseMatrix):
        return None
    return matrix.weight.view(count, -1, matrix.in_features)


def rows_of(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)


def held_elsewhere(weight: Weight) -> Weight:
    """A tensor that the checkpoint has, and another rank reads."""
    return replace(weight, place=NOWHERE, part=(slice(0, 0),) * len(weight.shape))
