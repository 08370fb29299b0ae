"""Attention as a model sees it: hand over q, k and v; the pages are the backend's business."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import AttentionBatch


@dataclass(frozen=True)
class Step:
    """What a forward pass needs besides token ids and positions."""

    batch: AttentionBatch
    cache: Tensor
    backend: AttentionBackend


@dataclass(frozen=True)
class Attention:
    """One layer's attention over the paged cache."""

    layer: int
    scale: float
    window: int | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """`q` is `[tokens, heads, head_dim]`; `k` and `v` have the KV heads."""
        step.backend.write_kv(step.cache, self.layer, k, v, step.batch)
        return step.backend.paged_attention(
            q, step.cache, self.layer, step.batch, self.scale, self.window
        )
