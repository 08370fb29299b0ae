"""Attention as a model sees it: hand over qkv; positions and pages are the backend's business."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.plain import Rotation
from quire.layers.norm import HeadNorm


@dataclass(frozen=True)
class Step:
    """What a forward pass needs besides token ids and positions."""

    batch: AttentionBatch
    cache: Tensor
    backend: Backend


@dataclass(frozen=True)
class Attention:
    """One layer's attention over the paged cache."""

    layer: int
    scale: float
    window: int | None = None

    def __call__(
        self, qkv: Tensor, norm: HeadNorm | None, rotation: Rotation, step: Step
    ) -> Tensor:
        """`qkv` is `[tokens, heads + 2 * kv_heads, head_dim]`, not yet turned."""
        backend, cache, batch = step.backend, step.cache, step.batch
        scale = None if norm is None else norm.scale
        q = backend.rotate_and_write(qkv, scale, rotation, cache, self.layer, batch)
        return backend.paged_attention(q, cache, self.layer, batch, self.scale, self.window)
