"""The Triton kernels behind the contract of every backend. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import is_fp8, scales_of
from quire.kernels.plain import HeadScale, PlainOps, Rotation
from quire.kernels.triton.attention.decode import decode_attention, span_of, split_decodes
from quire.kernels.triton.attention.dense import LEAST, Gathered, dense_attention, gather_plan
from quire.kernels.triton.attention.kv_splits import KVSplits
from quire.kernels.triton.attention.prefill import prefill_attention
from quire.kernels.triton.copy import copy_blocks
from quire.kernels.triton.gemv import gemv, is_few
from quire.kernels.triton.norm import add_rms_norm
from quire.kernels.triton.rotate import rotate_and_write
from quire.kernels.triton.silu_mul import silu_mul
from quire.kernels.triton.write import write_kv


@dataclass
class _Pass:
    """What one pass over the layers works out once: what is in its batch, and its KV splits."""

    batch: AttentionBatch
    layer: int = -1
    splits: dict[int | None, KVSplits] = field(default_factory=dict)  # by window
    gathered: Gathered | None = None

    def __post_init__(self) -> None:
        lengths = self.batch.query_lens
        self.span = span_of(lengths)
        self.has_few = any(0 < length <= self.span for length in lengths)
        self.has_several = any(self.span < length < LEAST for length in lengths)
        self.has_long = self.batch.max_query_len >= LEAST
        self.rows = sum(lengths)


class TritonBackend(PlainOps):
    name = "triton"

    def __init__(self) -> None:
        self._pass: _Pass | None = None
        self._scales: tuple[Tensor, Tensor] | None = None  # of the pool that was last seen

    def add_rms_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        return add_rms_norm(stream, delta, weight, eps)

    def rotate_and_write(
        self,
        qkv: Tensor,
        scale: HeadScale | None,
        rotation: Rotation,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> Tensor:
        pages, scales = self._pages(cache, layer)
        return rotate_and_write(qkv, scale, rotation, pages, scales, batch.slot_mapping)

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None
    ) -> Tensor:
        if is_few(x, weight):
            return gemv(x, weight, bias, gated=True)
        return super().gated_linear(x, weight, bias, packed)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def write_kv(
        self, cache: Tensor, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch
    ) -> None:
        write_kv(*self._pages(cache, layer), k, v, batch.slot_mapping)

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Each kernel goes over all sequences and leaves alone those that are another's."""
        this = self._this_pass(batch, layer)
        padded = this.rows < q.shape[0]
        out = (torch.zeros if padded else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
        pages, scales = self._pages(cache, layer)
        if this.has_few:
            is_new = window not in this.splits
            if is_new:
                this.splits[window] = split_decodes(batch, q, pages, window, this.span)
            splits = this.splits[window]
            decode_attention(q, pages, scales, batch, splits, scale, window, out, just_split=is_new)
        gathered = None
        if this.has_long and window is None:
            gathered = this.gathered = this.gathered or gather_plan(batch, q, pages)
        if gathered is not None:
            dense_attention(q, pages, scales, batch, gathered, scale, out)
            if this.has_several:
                prefill_attention(q, pages, scales, batch, scale, window, out, this.span, LEAST)
        elif this.has_long or this.has_several:
            prefill_attention(q, pages, scales, batch, scale, window, out, this.span)
        return out

    def _this_pass(self, batch: AttentionBatch, layer: int) -> _Pass:
        """Layers come in order: a batch that starts over may have new lengths on the device.

        So every pass works out its own, and a captured graph has all that it needs in itself.
        """
        last = self._pass
        if last is None or last.batch is not batch or layer <= last.layer:
            last = self._pass = _Pass(batch)
        last.layer = layer
        return last

    def _pages(self, cache: Tensor, layer: int) -> tuple[Tensor, Tensor | None]:
        """One layer of the pool, and its scales if it is in fp8."""
        if not is_fp8(cache):
            return cache[:, layer], None
        if self._scales is None or self._scales[0] is not cache:
            self._scales = cache, scales_of(cache)
        return cache[:, layer], self._scales[1][:, layer]

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        copy_blocks(cache, sources, targets)
