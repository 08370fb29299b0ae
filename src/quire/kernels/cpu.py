"""Paged attention on a CPU: gather pages into dense K and V, then torch's own attention.

Query heads that share a KV head are attention's heads here, and (sequence, KV head) its batch, so
that K and V are broadcast to them rather than repeated. Indices and masks are planned once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.adapter_slots import SortedRows
from quire.kernels.adapters import add_adapters
from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu_latent import expanded_attention, latent_attention, write_latents
from quire.kernels.cpu_plan import (
    AttentionPlan,
    DecodeGroup,
    PrefillTiles,
    SlotRows,
    bits_of,
    page_unit,
    plan_attention,
    plan_write,
    slot_unit,
)
from quire.kernels.experts import ExpertMatrices, ExpertMLPs, Routing, weighted_sum
from quire.kernels.pages import LatentPages, LayerPages, PageShape
from quire.kernels.plain import PlainOps
from quire.kernels.scoring import Scoring

Shapes = tuple[PageShape, PageShape]  # of K and of V


@dataclass
class CpuPlan:
    """What was planned for a batch by its first layer, for the layers after it."""

    writes: dict[Shapes, SlotRows] = field(default_factory=dict)
    attentions: dict[tuple[Shapes, int | None, torch.dtype], AttentionPlan] = field(
        default_factory=dict
    )


class CpuBackend(PlainOps):
    name = "cpu"

    def begin(self, batch: AttentionBatch) -> None:
        batch.plan.content = CpuPlan()

    def write_kv(self, pages: LayerPages, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        rows = _plan_write(batch, pages)
        if rows.kept is not None:
            k, v = k[rows.kept], v[rows.kept]
        for part, shape, at, new in (
            (pages.k, pages.k_shape, rows.k, k),
            (pages.v, pages.v_shape, rows.v, v),
        ):
            unit = slot_unit(shape)
            _matrix(part, shape, unit).index_copy_(0, at, new.reshape(-1, unit))

    def paged_attention(
        self, q: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring
    ) -> Tensor:
        plan = _plan_attention(batch, pages, scoring.window, q.dtype)
        if plan.is_one_group:
            return _decode(q, pages, plan.groups[0], scoring)
        out = torch.zeros((*q.shape[:2], pages.v_width), dtype=q.dtype)
        for group in plan.groups:
            rows = q.index_select(0, group.rows)
            out.index_copy_(0, group.rows, _decode(rows, pages, group, scoring))
        for prefill in plan.prefills:
            attend_prefill(q, pages, prefill, scoring, out)
        return out

    def write_latents(self, pages: LatentPages, latents: Tensor, batch: AttentionBatch) -> None:
        write_latents(pages, latents, batch)

    def latent_attention(
        self, q: Tensor, pages: LatentPages, batch: AttentionBatch, scale: float
    ) -> Tensor:
        return latent_attention(q, pages, batch, scale)

    def expanded_attention(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        return expanded_attention(q, kv, k_rope, batch, scale)

    def experts(self, x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
        """Tokens sorted by expert; each expert that has some is multiplied once, with those."""
        tokens, top_k = routing.experts.shape
        chosen = routing.experts.numpy().ravel()
        order = np.argsort(chosen, kind="stable")
        bounds = np.searchsorted(chosen[order], np.arange(mlps.count + 1))
        # Those that go nowhere are before the first bound and behind the last.
        going = torch.from_numpy(order[bounds[0] : bounds[-1]])
        sizes = np.diff(bounds).tolist()
        rows = x.index_select(0, going // top_k)
        both = self.grouped_linear(mlps.gate_up, rows, sizes)
        adapters = mlps.adapters
        if adapters is not None:
            slots = adapters.batch.slots[going // top_k].numpy()
            numbers = np.where(slots < 0, slots, slots * mlps.count + chosen[going])
            batch = SortedRows.of(numbers.astype(np.int32)).on(x.device)
            add_adapters(rows, adapters.gate_up, batch, both)
        hidden = self.act_and_mul(both, mlps.activation)
        found = self.grouped_linear(mlps.down, hidden, sizes)
        if adapters is not None:
            add_adapters(hidden, adapters.down, batch, found)
        make = torch.empty if len(going) == len(chosen) else torch.zeros
        results = make((len(chosen), x.shape[1]), dtype=x.dtype).index_copy_(0, going, found)
        return weighted_sum(results.view(tokens, top_k, x.shape[1]), routing.weights)

    def grouped_linear(self, matrices: ExpertMatrices, rows: Tensor, sizes: list[int]) -> Tensor:
        """`sizes`: how many rows are the first expert's, how many after them the next one's, …"""
        parts = enumerate(rows.split(sizes))
        found = [matrices.multiply(expert, part) for expert, part in parts if sizes[expert]]
        return torch.cat(found or [matrices.multiply(0, rows)])

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        # Image by image, each as one piece: indexing would move single bytes, 100 times slower.
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            cache[target].copy_(cache[source])


def _plan_write(batch: AttentionBatch, pages: LayerPages) -> SlotRows:
    plan: CpuPlan = batch.plan.content
    key = pages.k_shape, pages.v_shape
    if key not in plan.writes:
        plan.writes[key] = plan_write(batch, pages)
    return plan.writes[key]


def _plan_attention(
    batch: AttentionBatch, pages: LayerPages, window: int | None, dtype: torch.dtype
) -> AttentionPlan:
    plan: CpuPlan = batch.plan.content
    key = (pages.k_shape, pages.v_shape), window, dtype
    if key not in plan.attentions:
        plan.attentions[key] = plan_attention(batch, pages, window, dtype)
    return plan.attentions[key]


def _matrix(pages: Tensor, shape: PageShape, unit: int) -> Tensor:
    """The pool from the layer's first page on, as a matrix with `unit` numbers in a row."""
    own = shape.kv_heads * shape.block_size * shape.width
    rows = ((len(pages) - 1) * shape.block_stride + own) // unit
    return pages.as_strided((rows, unit), (unit, 1))


def _gather(pages: Tensor, shape: PageShape, rows: Tensor, sequences: int) -> Tensor:
    """`[sequences, kv_heads, tokens, width]`, contiguous."""
    found = _matrix(pages, shape, page_unit(shape)).index_select(0, rows)
    return found.view(sequences, shape.kv_heads, -1, shape.width)


def _decode(q: Tensor, pages: LayerPages, group: DecodeGroup, scoring: Scoring) -> Tensor:
    sequences, heads, width = q.shape
    k = _gather(pages.k, pages.k_shape, group.pages.k, sequences)[:, :, : group.length]
    v = _gather(pages.v, pages.v_shape, group.pages.v, sequences)[:, :, : group.length]
    if group.live is not None:
        # A slot that was never written may hold NaN, which would pass through any mask.
        for part in (k, v):
            part[:, :, group.first_dead :].view(bits_of(part.dtype)).bitwise_and_(group.live)
    q = q.reshape(sequences * pages.kv_heads, -1, 1, width)
    out = _attend(q, k.flatten(0, 1), v.flatten(0, 1), group.mask, scoring)
    return out.reshape(sequences, heads, -1)


def attend_prefill(
    q: Tensor, pages: LayerPages, prefill: PrefillTiles, scoring: Scoring, out: Tensor
) -> None:
    k = _gather(pages.k, pages.k_shape, prefill.pages.k, 1)[0]
    v = _gather(pages.v, pages.v_shape, prefill.pages.v, 1)[0]
    for tile in prefill.tiles:
        rows = q[tile.rows]
        heads = rows.view(len(rows), pages.kv_heads, -1, pages.k_width).permute(1, 2, 0, 3)
        seen = _attend(heads, k[:, tile.keys], v[:, tile.keys], tile.mask, scoring)
        out[tile.rows] = seen.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """`q` `[batch, group, rows, width]` to `k` and `v` `[batch, tokens, width]`, which its group
    shares. What torch's own attention does not offer is computed step by step, in float32."""
    k, v = (part.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for part in (k, v))
    if scoring.is_plain:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
    scores = q.float() @ k.float().transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh_().mul_(scoring.softcap)
    if mask is not None:
        scores += mask
    tokens = scores.shape[-1]
    if scoring.sinks is not None:
        # A key more for each head; heads are laid out over batch and group, sequence by sequence.
        sinks = scoring.sinks.float().view(-1, q.shape[1])
        sinks = sinks.repeat(len(q) // len(sinks), 1)[:, :, None, None]
        scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., :tokens]
    return (weights @ v.float()).to(q.dtype)
