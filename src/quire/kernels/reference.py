"""The oracle: attention over pages, as slow and as obvious as it can be said."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import dequantise, is_fp8, quantise, scales_of
from quire.kernels.plain import PlainOps


class ReferenceBackend(PlainOps):
    """One token, one sequence, one head at a time; every other backend is held against it."""

    name = "reference"

    def write_kv(
        self, cache: Tensor, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch
    ) -> None:
        block_size = cache.shape[4]
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            if slot < 0:
                continue
            block, offset = divmod(slot, block_size)
            kv = torch.stack((k[token], v[token]))
            if is_fp8(cache):
                kv, scales = quantise(kv)
                scales_of(cache)[block, layer, :, :, offset] = scales
            cache[block, layer, :, :, offset] = kv

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        starts = batch.query_starts.tolist()
        contexts = batch.context_lens.tolist()
        for sequence, context in enumerate(contexts):
            k, v = gather(cache, layer, batch.block_tables[sequence], context)
            first, end = starts[sequence], starts[sequence + 1]
            for row in range(first, end):
                position = context - (end - row)
                oldest = 0 if window is None else max(0, position - window + 1)
                seen = slice(oldest, position + 1)
                if position >= 0:
                    out[row] = attend(q[row], k[:, seen], v[:, seen], scale)
        return out

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        images = [cache[block].clone() for block in sources.tolist()]
        for block, image in zip(targets.tolist(), images, strict=True):
            cache[block] = image


def gather(cache: Tensor, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """K and V `[kv_heads, context, head_dim]` of one sequence, in float32, slot by slot."""
    block_size = cache.shape[4]
    kv = cache.new_empty((2, cache.shape[3], context, cache.shape[5]), dtype=torch.float32)
    blocks = table.tolist()
    for position in range(context):
        block, offset = blocks[position // block_size], position % block_size
        found = cache[block, layer, :, :, offset]
        if is_fp8(cache):
            found = dequantise(found, scales_of(cache)[block, layer, :, :, offset])
        kv[:, :, position] = found
    return kv[0], kv[1]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One token's heads `[heads, head_dim]` against `[kv_heads, seen, head_dim]`, in float32."""
    group = q.shape[0] // k.shape[0]
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        keys, values = k[head // group], v[head // group]
        scores = keys @ q[head].float() * scale
        out[head] = scores.softmax(dim=0) @ values
    return out
