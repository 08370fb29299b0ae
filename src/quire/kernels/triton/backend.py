"""The Triton kernels behind the contract of every backend. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.plain import HeadScale, PlainOps, Rotation
from quire.kernels.triton.copy import copy_blocks
from quire.kernels.triton.decode import decode_attention
from quire.kernels.triton.gate import silu_mul
from quire.kernels.triton.norm import add_rms_norm
from quire.kernels.triton.prefill import prefill_attention
from quire.kernels.triton.rotate import rotate_and_write
from quire.kernels.triton.write import write_kv


@dataclass(frozen=True)
class _Kinds:
    """What is in a batch: decided from its lists once a step, not once a layer."""

    batch: AttentionBatch | None = None
    has_decodes: bool = False
    has_prefills: bool = False
    rows: int = 0

    @classmethod
    def of(cls, batch: AttentionBatch) -> _Kinds:
        return cls(batch, 1 in batch.query_lens, batch.max_query_len > 1, sum(batch.query_lens))


class TritonBackend(PlainOps):
    name = "triton"

    def __init__(self) -> None:
        self._kinds = _Kinds()

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
        return rotate_and_write(qkv, scale, rotation, cache[:, layer], batch.slot_mapping)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def write_kv(
        self, cache: Tensor, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch
    ) -> None:
        write_kv(cache[:, layer], k, v, batch.slot_mapping)

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Each of the two kernels goes over all sequences and leaves the other's alone."""
        if self._kinds.batch is not batch:
            self._kinds = _Kinds.of(batch)
        kinds = self._kinds
        padded = kinds.rows < q.shape[0]
        out = (torch.zeros if padded else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
        if kinds.has_decodes:
            decode_attention(q, cache[:, layer], batch, scale, window, out)
        if kinds.has_prefills:
            prefill_attention(q, cache[:, layer], batch, scale, window, out)
        return out

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        copy_blocks(cache, sources, targets)
