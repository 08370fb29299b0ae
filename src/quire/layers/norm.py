"""RMS normalisation, over the residual stream and over single heads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.plain import HeadScale
from quire.layers.weights import Layer, Weight, parameter, sibling


class RMSNorm(Layer):
    """Normalises the residual stream on its way into a block."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)

    def forward(self, stream: Tensor, delta: Tensor | None, backend: Backend) -> Tensor:
        """Add `delta`, what the last block computed, to `stream` in place; then normalise."""
        return backend.add_rms_norm(stream, delta, self.weight, self.eps)

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", tuple(self.weight.shape), self.weight)


class HeadNorm(Layer):
    """Normalises each head of q and k, which lie side by side.

    `order` is that of a head's features, where it is not the checkpoint's (`layers/rope.py`).
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, eps: float, order: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.order = order
        self.eps = eps
        self.heads = heads
        self.weight = parameter(heads + kv_heads, head_dim)  # all rows of q alike, all of k alike

    @property
    def scale(self) -> HeadScale:
        return HeadScale(self.weight, self.eps)

    def weights(self, path: str) -> Iterator[Weight]:
        shape = tuple(self.weight.shape[1:])
        places = {"q_norm": self.weight[: self.heads], "k_norm": self.weight[self.heads :]}
        for name, place in places.items():
            yield Weight(sibling(path, f"{name}.weight"), shape, place, order=self.order)
