"""RMS normalisation, over the residual stream and over single heads.

The numbers are Hugging Face's: normalised in float32, rounded to the model's type, then weighted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.layers.weights import Layer, Weight, parameter, sibling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension to a root mean square of one, then by `weight`."""
    shape = x.shape[-1:]
    if x.dtype == torch.float32 and weight.dim() == 1:
        return torch.rms_norm(x, shape, weight, eps)  # one call: there is nothing to round between
    return torch.rms_norm(x, shape, None, eps).mul_(weight)


class RMSNorm(Layer):
    """Normalises the residual stream on its way into a block."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)

    def forward(self, stream: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, what the last block computed, to `stream` in place; then normalise."""
        if delta is not None:
            stream.add_(delta)
        return rms_norm(stream, self.weight, self.eps)

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", tuple(self.weight.shape), self.weight)


class HeadNorm(Layer):
    """Normalises each head of q and k, which lie side by side, in one go."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.heads = heads
        self.weight = parameter(heads + kv_heads, head_dim)  # all rows of q alike, all of k alike

    def forward(self, qk: Tensor) -> Tensor:
        return rms_norm(qk, self.weight, self.eps)

    def weights(self, path: str) -> Iterator[Weight]:
        shape = tuple(self.weight.shape[1:])
        yield Weight(sibling(path, "q_norm.weight"), shape, self.weight[: self.heads])
        yield Weight(sibling(path, "k_norm.weight"), shape, self.weight[self.heads :])
