"""The Triton kernels behind the contract of every backend. Nothing here waits for the device.

Kernels of experts and of latents are imported when a layer first needs them: to read the source of
all of them takes longer than a start may.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace

import torch
from torch import Tensor

from quire.kernels.activation import Activation, ClampedSwiGLU, Gating
from quire.kernels.batch import AttentionBatch
from quire.kernels.codes import CodeFormat, Codes
from quire.kernels.experts import ExpertMLPs, RouterProducts, Routing
from quire.kernels.linear import PackedMatrix, add_linear
from quire.kernels.pages import LatentPages, LayerPages
from quire.kernels.plain import HeadScale, PlainOps, Rotation
from quire.kernels.scoring import Scoring
from quire.kernels.triton.act_and_mul import act_and_mul, quantised_gate
from quire.kernels.triton.attention.decode import decode_attention, span_of, split_decodes
from quire.kernels.triton.attention.dense import LEAST, Gathered, dense_attention, gather_plan
from quire.kernels.triton.attention.kv_splits import KVSplits
from quire.kernels.triton.attention.prefill import prefill_attention
from quire.kernels.triton.copy import copy_blocks
from quire.kernels.triton.gemv import gemv, is_few
from quire.kernels.triton.norm import add_rms_norm, quantised_norm
from quire.kernels.triton.rotate import rotate_and_write
from quire.kernels.triton.write import write_kv


@dataclass
class _Pass:
    """What one pass over the layers works out once: what is in its batch, and its KV splits."""

    query_lens: InitVar[list[int]]
    splits: dict[tuple[int | None, int, int], KVSplits] = field(default_factory=dict)
    gathered: Gathered | None = None
    runs: KVSplits | None = None
    jobs: Tensor | None = None  # of expanded prompts

    def __post_init__(self, lengths: list[int]) -> None:
        self.span = span_of(lengths)
        self.has_few = any(0 < length <= self.span for length in lengths)
        self.has_several = any(self.span < length < LEAST for length in lengths)
        self.has_long = max(lengths, default=0) >= LEAST
        self.rows = sum(lengths)


class TritonBackend(PlainOps):
    name = "triton"

    def begin(self, batch: AttentionBatch) -> None:
        batch.plan.content = _Pass(batch.query_lens)

    def add_rms_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        return add_rms_norm(stream, delta, weight, eps)

    def norm_products(
        self,
        stream: Tensor,
        weight: Tensor,
        eps: float,
        matrix: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor] | None:
        from quire.kernels.triton.norm_products import norm_products

        return norm_products(stream, weight, eps, matrix, bias, dtype)

    def rotate_and_write(
        self,
        qkv: Tensor,
        scale: HeadScale | None,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
    ) -> Tensor:
        return rotate_and_write(qkv, scale, rotation, pages, batch.slot_mapping)

    def gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: PackedMatrix | None,
        activation: Activation,
    ) -> Tensor:
        if is_few(x, weight):
            return gemv(x, weight, bias, activation)
        return super().gated_linear(x, weight, bias, packed, activation)

    def act_and_mul(self, gate_up: Tensor, activation: Gating) -> Tensor:
        if isinstance(activation, ClampedSwiGLU):
            return super().act_and_mul(gate_up, activation)
        return act_and_mul(gate_up, activation)

    def quantised_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: CodeFormat
    ) -> Codes:
        return quantised_norm(stream, delta, weight, eps, form)

    def quantised_gate(self, gate_up: Tensor, activation: Activation, form: CodeFormat) -> Codes:
        return quantised_gate(gate_up, activation, form)

    def experts(self, x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
        """Grouped products; formats without kernels are computed plainly."""
        from quire.kernels.triton.experts.adapted import adapted_experts
        from quire.kernels.triton.experts.mlps import experts, experts_and_shared

        shared = mlps.shared
        if shared is not None:
            found = experts_and_shared(x, routing, mlps, shared)
            if found is not None:
                return found
            found = self.experts(x, routing, replace(mlps, shared=None))
            assert isinstance(mlps.activation, Activation)
            hidden = self.gated_linear(x, shared.gate_up, None, None, mlps.activation)
            add_linear(hidden, shared.down, None, None, found)
            return found
        compute = experts if mlps.adapters is None else adapted_experts
        found = compute(x, routing, mlps)
        return super().experts(x, routing, mlps) if found is None else found

    def choosing_experts(
        self, x: Tensor, products: RouterProducts, mlps: ExpertMLPs
    ) -> Tensor | None:
        from quire.kernels.triton.experts.mlps import choosing_experts

        return choosing_experts(x, products, mlps)

    def write_kv(self, pages: LayerPages, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        write_kv(pages, k, v, batch.slot_mapping)

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
        scoring: Scoring,
    ) -> Tensor | None:
        from quire.kernels.triton.attention.rotated_decode import can_rotate, rotate_and_attend

        if not can_rotate(qkv, pages, batch, scoring):
            return None
        heads = qkv.shape[1] // pages.k_width - 2 * pages.kv_heads
        q = qkv[:, : heads * pages.k_width].unflatten(1, (heads, pages.k_width))
        splits, is_new = self._splits(q, pages, batch, scoring.window)
        return rotate_and_attend(qkv, rotation, pages, batch, splits, scoring, just_split=is_new)

    def paged_attention(
        self, q: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring
    ) -> Tensor:
        """Each kernel goes over all sequences and leaves alone those that are another's."""
        this: _Pass = batch.plan.content
        tokens, heads, _ = q.shape
        make = torch.zeros if this.rows < tokens else torch.empty  # padded, or not
        out = make((tokens, heads, pages.v_width), dtype=q.dtype, device=q.device)
        if this.has_few:
            splits, is_new = self._splits(q, pages, batch, scoring.window)
            decode_attention(q, pages, batch, splits, scoring, out, just_split=is_new)
        gathered = None
        if this.has_long and scoring.window is None and scoring.softcap is None:
            gathered = this.gathered = this.gathered or gather_plan(batch, q, pages)
        if gathered is not None:
            dense_attention(q, pages, batch, gathered, scoring, out)
            if this.has_several:
                prefill_attention(q, pages, batch, scoring, out, this.span, LEAST)
        elif this.has_long or this.has_several:
            prefill_attention(q, pages, batch, scoring, out, this.span)
        return out

    def _splits(
        self, q: Tensor, pages: LayerPages, batch: AttentionBatch, window: int | None
    ) -> tuple[KVSplits, bool]:
        """How decodes are split, and whether that was launched only now."""
        this: _Pass = batch.plan.content
        key = window, q.shape[1], pages.v_width
        is_new = key not in this.splits
        if is_new:
            this.splits[key] = split_decodes(batch, q, pages, window, this.span)
        return this.splits[key], is_new

    def rotate_and_write_latents(
        self,
        q: Tensor,
        kv: Tensor,
        scale: HeadScale,
        rotation: Rotation,
        pages: LatentPages,
        batch: AttentionBatch,
        out: Tensor,
    ) -> None:
        from quire.kernels.triton.latent.write import rotate_and_write_latents

        rotate_and_write_latents(q, kv, scale, rotation, pages, batch, out)

    def latent_attention(
        self, q: Tensor, pages: LatentPages, batch: AttentionBatch, scale: float
    ) -> Tensor:
        from quire.kernels.triton.latent.decode import attend, decode_latents, split_latents
        from quire.kernels.triton.latent.runs import list_runs

        this: _Pass = batch.plan.content
        tokens, heads, _ = q.shape
        make = torch.zeros if this.rows < tokens else torch.empty  # padded, or not
        out = make((tokens, heads, pages.rank), dtype=q.dtype, device=q.device)
        if this.has_few:
            key = None, heads, pages.rank
            if key not in this.splits:
                this.splits[key] = split_latents(batch, q, pages, this.span)
            decode_latents(q, pages, batch, this.splits[key], scale, out)
        if this.has_several or this.has_long:
            this.runs = this.runs or list_runs(batch, q, pages, this.span)
            attend(q, pages, batch, this.runs, scale, out)
        return out

    def expanded_attention(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        from quire.kernels.triton.latent.hopper_prompt import expanded_jobs, has_hopper_kernel

        this: _Pass = batch.plan.content
        rope = k_rope.shape[1]
        nope = q.shape[2] - rope
        values = kv.shape[2] - nope
        if not has_hopper_kernel(q.device, q.dtype, nope, rope, values):
            from quire.kernels.triton.latent.prompt import expanded_attention

            return expanded_attention(q, kv, k_rope, batch, scale)
        from quire.kernels.triton.attention.hopper import attend_expanded

        if this.jobs is None:
            this.jobs = expanded_jobs(batch, q.device)
        out = torch.empty((*q.shape[:2], values), dtype=q.dtype, device=q.device)
        attend_expanded(q, kv, k_rope, this.jobs, scale, out)
        return out

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        copy_blocks(cache, sources, targets)
