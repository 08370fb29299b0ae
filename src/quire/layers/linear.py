"""Linear layers split over ranks: by output columns, or by input rows.

A pair of them needs one exchange: the column layer leaves each rank with its own outputs, which
the row layer takes as its own inputs, and only the row layer's sums must meet.

    x ── ColumnLinear (q, k, v) ── attention on this rank's heads ── RowLinear (o) ── all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from quire.kernels.backend import Backend
from quire.kernels.linear import linear, pack
from quire.layers.tp import TensorParallel
from quire.layers.weights import Layer, Weight, parameter, sibling, span


@dataclass(frozen=True)
class Output:
    """One of the checkpoint's matrices that a `ColumnLinear` merges."""

    name: str
    units: int  # what is dealt out to the ranks: heads, or single features
    width: int = 1  # features of one unit
    what: str = "features"
    shared: bool = False  # with fewer units than ranks, ranks may hold the same one

    def part(self, tp: TensorParallel) -> range:
        """The features this rank computes."""
        split = tp.split_or_share if self.shared else tp.split
        units = split(self.units, self.what)
        return range(units.start * self.width, units.stop * self.width)


class Linear(Layer):
    """A matrix to multiply by, and a copy of it in the order that the CPU reads fastest."""

    weight: nn.Parameter
    packed: Tensor | None = None

    def pack(self) -> None:
        self.packed = pack(self.weight)


class ColumnLinear(Linear):
    """Several products of the same input, merged into one; each rank has a part of each."""

    def __init__(
        self, in_features: int, outputs: Sequence[Output], bias: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.outputs = tuple(outputs)
        self.in_features = in_features
        self.parts = [output.part(tp) for output in outputs]
        self.sizes = [len(part) for part in self.parts]
        self.weight = parameter(sum(self.sizes), in_features)
        self.bias = parameter(sum(self.sizes)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed)

    def gated(self, x: Tensor, backend: Backend) -> Tensor:
        """Of two outputs alike, `silu(first) * second`."""
        return backend.gated_linear(x, self.weight, self.bias, self.packed)

    def weights(self, path: str) -> Iterator[Weight]:
        start = 0
        for output, part in zip(self.outputs, self.parts, strict=True):
            name = sibling(path, output.name)
            rows = slice(start, start + len(part))
            features = output.units * output.width
            yield Weight(
                f"{name}.weight", (features, self.in_features), self.weight[rows], (span(part),)
            )
            if self.bias is not None:
                yield Weight(f"{name}.bias", (features,), self.bias[rows], (span(part),))
            start += len(part)


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
    ) -> None:
        super().__init__()
        self.tp = tp
        self.shape = (out_features, units * width)
        mine = tp.split(units, what)
        self.part = range(mine.start * width, mine.stop * width)
        self.weight = parameter(out_features, len(self.part))
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.tp.rank == 0 else None  # the sum over ranks must have it once
        return self.tp.all_reduce(linear(x, self.weight, bias, self.packed))

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", self.shape, self.weight, (slice(None), span(self.part)))
        if self.bias is not None:
            yield Weight(f"{path}.bias", self.shape[:1], self.bias)
