"""Paged attention on a CPU: gather pages into dense K and V, then torch's own attention.

Query heads that share a KV head are attention's heads here, and (sequence, KV head) its batch, so
that K and V are broadcast to them rather than repeated. Indices and masks are planned once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu_plan import (
    AttentionPlan,
    DecodeGroup,
    Geometry,
    PrefillTiles,
    bits_of,
    plan_attention,
    plan_write,
)
from quire.kernels.plain import PlainOps


@dataclass(frozen=True)
class _Step:
    """What was planned for a batch by its first layer, for the layers after it."""

    batch: AttentionBatch | None = None
    writes: dict[Geometry, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    attentions: dict[tuple[Geometry, int | None, torch.dtype], AttentionPlan] = field(
        default_factory=dict
    )


class CpuBackend(PlainOps):
    name = "cpu"

    def __init__(self) -> None:
        self._step = _Step()

    def write_kv(
        self, cache: Tensor, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch
    ) -> None:
        shape = Geometry(*cache.shape)
        kept, rows = self._plan_write(batch, shape)
        if kept is not None:
            k, v = k[kept], v[kept]
        head_rows = shape.kv_heads * shape.block_size
        pool = cache.view(-1, shape.head_dim)[layer * shape.kv_dim * head_rows :]
        pool.index_copy_(0, rows, k.reshape(-1, shape.head_dim))
        pool[head_rows:].index_copy_(0, rows, v.reshape(-1, shape.head_dim))

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        shape = Geometry(*cache.shape)
        plan = self._plan_attention(batch, shape, window, q.dtype)
        pool = pages(cache, layer, shape)
        if plan.is_one_group:
            return _decode(q, pool, plan.groups[0], shape, scale)
        out = torch.zeros(q.shape, dtype=q.dtype)
        for group in plan.groups:
            rows = q.index_select(0, group.rows)
            out.index_copy_(0, group.rows, _decode(rows, pool, group, shape, scale))
        for prefill in plan.prefills:
            attend_prefill(q, pool, prefill, shape, scale, out)
        return out

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        # Image by image, each as one piece: indexing would move single bytes, 100 times slower.
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            cache[target].copy_(cache[source])

    def _plan_write(self, batch: AttentionBatch, shape: Geometry) -> tuple[Tensor | None, Tensor]:
        plans = self._at(batch).writes
        if shape not in plans:
            plans[shape] = plan_write(batch, shape)
        return plans[shape]

    def _plan_attention(
        self, batch: AttentionBatch, shape: Geometry, window: int | None, dtype: torch.dtype
    ) -> AttentionPlan:
        plans, key = self._at(batch).attentions, (shape, window, dtype)
        if key not in plans:
            plans[key] = plan_attention(batch, shape, window, dtype)
        return plans[key]

    def _at(self, batch: AttentionBatch) -> _Step:
        step = self._step
        if step.batch is not batch:
            step = self._step = _Step(batch)
        return step  # this one, whatever another thread has put there meanwhile


def pages(cache: Tensor, layer: int, shape: Geometry) -> Tensor:
    """The pool as a matrix of pages that starts at the layer's first one."""
    return cache.view(-1, shape.block_size * shape.head_dim)[
        layer * shape.kv_dim * shape.kv_heads :
    ]


def _decode(q: Tensor, pool: Tensor, group: DecodeGroup, shape: Geometry, scale: float) -> Tensor:
    sequences, heads, head_dim = q.shape
    kv = pool.index_select(0, group.pages)
    kv = kv.view(2, sequences, shape.kv_heads, -1, head_dim)[..., : group.width, :]
    if group.live is not None:
        # A slot that was never written may hold NaN, which would pass through any mask.
        kv[..., group.first_dead :, :].view(bits_of(kv.dtype)).bitwise_and_(group.live)
    k, v = _broadcast(kv.flatten(1, 2), heads // shape.kv_heads)
    q = q.reshape(sequences * shape.kv_heads, -1, 1, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    return out.reshape(sequences, heads, head_dim)


def attend_prefill(
    q: Tensor, pool: Tensor, prefill: PrefillTiles, shape: Geometry, scale: float, out: Tensor
) -> None:
    kv = pool.index_select(0, prefill.pages).view(2, shape.kv_heads, -1, shape.head_dim)
    k, v = _broadcast(kv, q.shape[1] // shape.kv_heads)
    for tile in prefill.tiles:
        rows = q[tile.rows]
        heads = rows.view(len(rows), shape.kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)
        seen = F.scaled_dot_product_attention(
            heads, k[:, :, tile.keys], v[:, :, tile.keys], attn_mask=tile.mask, scale=scale
        )
        out[tile.rows] = seen.permute(2, 0, 1, 3).flatten(1, 2)


def _broadcast(kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """K and V, `[batch, group, tokens, head_dim]` each: the heads of a group share memory."""
    k, v = kv.unsqueeze(2).expand(-1, -1, heads, -1, -1)
    return k, v
