"""Layer normalisation, as encoders have it: behind each block, on what it adds to its input."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from quire.layers.weights import Layer, TensorPlace, Weight, parameter, sibling


class LayerNorm(Layer):
    """`name`: what checkpoints call it beside its path."""

    def __init__(self, size: int, eps: float, name: str) -> None:
        super().__init__()
        self.eps = eps
        self.name = name
        self.weight = parameter(size)
        self.bias = parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def weights(self, path: str) -> Iterator[Weight]:
        name, shape = sibling(path, self.name), tuple(self.weight.shape)
        yield Weight(f"{name}.weight", shape, TensorPlace(self.weight))
        yield Weight(f"{name}.bias", shape, TensorPlace(self.bias))
