"""Linear layers split over ranks: by output columns, or by input rows.

A pair of them needs one exchange: the column layer leaves each rank with its own outputs, which
the row layer takes as its own inputs, and only the row layer's sums must meet.

    x ── ColumnLinear (q, k, v) ── attention on this rank's heads ── RowLinear (o) ── all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.codes import Activations, CodeFormat, Codes
from quire.layers.formats import AllDense, MatrixFormats, stacked
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.tp import TensorParallel
from quire.layers.weights import Block, Fused, Layer, TensorPlace, Weight, parameter, sibling, span


@dataclass(frozen=True)
class Output:
    """One of the checkpoint's matrices that a `ColumnLinear` merges."""

    name: str
    units: int  # what is dealt out to the ranks: heads, or single features
    width: int = 1  # features of one unit
    what: str = "features"
    shared: bool = False  # with fewer units than ranks, ranks may hold the same one
    order: tuple[int, ...] = ()  # of the features of each unit, where it is not the checkpoint's

    @property
    def features(self) -> int:
        return self.units * self.width

    def part(self, tp: TensorParallel) -> range:
        """The features this rank computes."""
        split = tp.split_or_share if self.shared else tp.split
        units = split(self.units, self.what)
        return range(units.start * self.width, units.stop * self.width)


class MatrixLayer(Layer):
    """A layer with matrices, in whatever format the checkpoint has them."""

    def store_in(self, formats: MatrixFormats, path: str) -> None:
        """Store them as the checkpoint does; before `make_room`."""
        raise NotImplementedError

    def lay_out(self) -> None:
        """Put them, which are loaded, in the order that the device's kernels read."""
        raise NotImplementedError

    def pack(self) -> None:
        """Keep a second copy of them in the order that a CPU's kernels read, if that has a use."""
        raise NotImplementedError


class Linear(MatrixLayer):
    """A layer that multiplies by a matrix, of which it holds this rank's part."""

    matrix: Matrix

    def lay_out(self) -> None:
        for matrix in self.matrix.modules():  # itself, or those it is stacked of
            if isinstance(matrix, Matrix):
                matrix.lay_out()

    def pack(self) -> None:
        self.matrix.pack()

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        return self.matrix.takes(rows, dtype)

    def multiply(self, x: Activations, bias: Tensor | None) -> Tensor:
        if isinstance(x, Codes):
            return self.matrix.multiply_codes(x, bias)
        return self.matrix.multiply(x, bias)

    def store_in(self, formats: MatrixFormats, path: str) -> None:
        chosen = formats.of(path)
        self.matrix = chosen.matrix(self.matrix.out_features, self.matrix.in_features)


class ColumnLinear(Linear):
    """Several products of the same input, merged into one; each rank has a part of each.

    Some checkpoints have them merged, too, under the name `fused`.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[Output],
        bias: bool,
        tp: TensorParallel,
        fused: str | None = None,
    ) -> None:
        super().__init__()
        self.outputs = tuple(outputs)
        self.fused = fused
        self.in_features = in_features
        self.parts = [output.part(tp) for output in outputs]
        self.sizes = [len(part) for part in self.parts]
        self.matrix = DenseMatrix(sum(self.sizes), in_features)
        self.bias = parameter(sum(self.sizes)) if bias else None

    def forward(self, x: Activations) -> Tensor:
        return self.multiply(x, self.bias)

    def gated(
        self, x: Activations, backend: Backend, activation: Activation, reader: Block
    ) -> Activations:
        """`activation(first) * second` of two outputs alike, as `reader` takes it."""
        form = reader.takes(len(x), x.dtype)
        if form is not None:
            return backend.quantised_gate(self(x), activation, form)
        if isinstance(x, Codes):
            return backend.act_and_mul(self(x), activation)
        return self.matrix.gated(x, self.bias, backend, activation)

    def store_in(self, formats: MatrixFormats, path: str) -> None:
        fused = [sibling(path, self.fused)] if self.fused else []
        chosen = [formats.of(sibling(path, output.name), *fused) for output in self.outputs]
        self.matrix = stacked(chosen, self.sizes, self.in_features)

    def weights(self, path: str) -> Iterator[Weight]:
        held = above = 0
        total = sum(output.features for output in self.outputs)
        for output, part in zip(self.outputs, self.parts, strict=True):
            rows = slice(held, held + len(part))
            fused = self.fused and Fused(sibling(path, self.fused), above, total)
            whole = Weight(
                sibling(path, output.name),
                (output.features, self.in_features),
                part=(span(part),),
                fused=fused or None,
                order=output.order,
            )
            yield from self.matrix.weights(whole, rows)
            if self.bias is not None:
                bias = replace(whole, shape=(output.features,))
                yield bias.placed(TensorPlace(self.bias[rows]), ".bias")
            held += len(part)
            above += output.features


class RowLinear(Linear):
    """A product whose inputs are spread over the ranks, so that its partial sums must be added."""

    def __init__(
        self,
        units: int,
        out_features: int,
        bias: bool,
        tp: TensorParallel,
        width: int = 1,
        what: str = "features",
        name: str | None = None,
    ) -> None:
        """`name`: what checkpoints call it beside its path, where that is not its own name."""
        super().__init__()
        self.tp = tp
        self.name = name
        self.shape = (out_features, units * width)
        mine = tp.split(units, what)
        self.part = range(mine.start * width, mine.stop * width)
        self.matrix = DenseMatrix(out_features, len(self.part))
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: Activations) -> Tensor:
        return self.tp.all_reduce(self.partial(x))

    def partial(self, x: Activations) -> Tensor:
        """What this rank adds to the sum."""
        bias = self.bias if self.tp.rank == 0 else None  # the sum over ranks must have it once
        return self.multiply(x, bias)

    def add_partial(self, x: Activations, out: Tensor) -> None:
        """Add that to `out`."""
        if isinstance(x, Codes) or self.bias is not None:
            out.add_(self.partial(x))
        else:
            self.matrix.add_product(x, out)

    def onto(self, stream: Tensor, x: Activations) -> Tensor | None:
        """What is to be added to `stream`; None: one launch found and added it."""
        is_whole = self.tp.group is None and self.tp.size == 1
        if is_whole and isinstance(x, Tensor) and self.matrix.adds_at_once(x, stream):
            self.matrix.add_product(x, stream, self.bias)
            return None
        out: Tensor = self(x)
        return out

    def weights(self, path: str) -> Iterator[Weight]:
        path = path if self.name is None else sibling(path, self.name)
        whole = Weight(path, self.shape, part=(slice(None), span(self.part)))
        yield from self.matrix.weights(whole, slice(None))
        if self.bias is not None:
            yield Weight(f"{path}.bias", self.shape[:1], TensorPlace(self.bias))


def store_matrices(model: Block, formats: MatrixFormats) -> None:
    """Store each matrix of a model, which has no memory yet, as the checkpoint has it."""
    if formats == AllDense():  # as they are
        return
    for path, module in model.named_modules():
        if isinstance(module, MatrixLayer):
            module.store_in(formats, path)


def lay_out_matrices(model: Block) -> None:
    """Put the matrices of a model, which are loaded, in the order that the device's kernels read.

    One at a time, in its own place: nothing of the model is in memory twice.
    """
    for module in model.modules():
        if isinstance(module, MatrixLayer):
            module.lay_out()
