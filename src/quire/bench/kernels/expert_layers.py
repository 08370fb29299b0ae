"""Layers of experts with random weights, and how long their products take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.bench.report.stopwatch import replayable, seconds_per_call
from quire.kernels.backend import backend_for
from quire.kernels.experts import Routing
from quire.layers.experts import Experts
from quire.layers.formats import Dense, MatrixFormat
from quire.layers.quantized.fp4 import Mxfp4
from quire.layers.quantized.grouped import MADE_GROUP, Grouped
from quire.layers.quantized.scaled import Fp8
from quire.layers.tp import SINGLE
from quire.layers.weights import make_room

FORMATS: dict[str, MatrixFormat] = {
    "numbers": Dense(),
    "fp8 by row": Fp8(makes=True),
    "fp8 in blocks": Fp8(makes=True, block=(128, 128)),
    "4 bits in groups": Grouped(makes=True, bits=4, group=MADE_GROUP),
    "MXFP4": Mxfp4(makes=True),
}
LAYERS = 4


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    features: int

    def __str__(self) -> str:
        return (
            f"{self.experts} of {self.hidden:,} × {self.features:,}, of which a token chooses "
            f"{self.top_k}"
        )


@dataclass(frozen=True)
class InOneFormat:
    kind: MatrixFormat

    def of(self, *names: str) -> MatrixFormat:
        return self.kind


class Layers:
    """Each with weights and choices of its own."""

    def __init__(
        self, shape: Shape, kind: MatrixFormat, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.backend = backend_for(device)
        self.generator = torch.Generator(device).manual_seed(0)
        self.layers = [self._layer(kind) for _ in range(LAYERS)]
        # Tensor cores multiply eight bits by eight twice as fast.
        self.matrix_speed = 2 if isinstance(kind, Fp8) and device.type == "cuda" else 1
        self._chosen: dict[int, list[Routing]] = {}

    def seconds(self, tokens: int) -> float:
        """Of one layer's experts."""
        x = self._random(tokens, self.shape.hidden).to(self.dtype)
        routings = self.routings(tokens)

        def call() -> None:
            for layer, routing in zip(self.layers, routings, strict=True):
                layer(x, routing, self.backend)

        with torch.inference_mode():
            timed = seconds_per_call(replayable(call, self.device), self.device)
        return timed.median / LAYERS

    def routings(self, tokens: int) -> list[Routing]:
        if tokens not in self._chosen:
            self._chosen[tokens] = [self._routing(tokens) for _ in self.layers]
        return self._chosen[tokens]

    def bytes_read(self, tokens: int) -> float:
        """The weights of the experts that were chosen, in one layer on average."""
        [*parameters] = self.layers[0].parameters()
        of_expert = sum(each.nbytes for each in parameters) / self.shape.experts
        chosen = [len(routing.experts.unique()) for routing in self.routings(tokens)]
        return of_expert * sum(chosen) / LAYERS

    def operations(self, tokens: int) -> int:
        shape = self.shape
        return 2 * 3 * tokens * shape.top_k * shape.hidden * shape.features

    def _layer(self, kind: MatrixFormat) -> Experts:
        shape = self.shape
        with torch.device("meta"):
            layer = Experts(shape.hidden, shape.features, shape.experts, SINGLE)
            layer.store_in(InOneFormat(kind), "experts")
        make_room(layer, self.dtype, self.device)
        for weight in layer.weights("experts"):
            weight.fill(self._random(*weight.shape) * weight.shape[1] ** -0.5)
        layer.lay_out()
        layer.pack()
        return layer

    def _routing(self, tokens: int) -> Routing:
        scores = self._random(tokens, self.shape.experts)
        weights, experts = scores.softmax(-1).topk(self.shape.top_k)
        return Routing(experts, weights)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)
