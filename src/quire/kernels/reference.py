"""The oracle: attention over pages, as slow and as obvious as it can be said."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import dequantise, quantise
from quire.kernels.pages import LatentPages, LayerPages
from quire.kernels.plain import PlainOps
from quire.kernels.scoring import Scoring


class ReferenceBackend(PlainOps):
    """One token, one sequence, one head at a time; every other backend is held against it."""

    name = "reference"

    def write_kv(self, pages: LayerPages, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, pages.block_size)
                _write(pages.k, pages.k_scales, block, offset, k[token])
                _write(pages.v, pages.v_scales, block, offset, v[token])

    def paged_attention(
        self, q: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring
    ) -> Tensor:
        out = torch.zeros((*q.shape[:2], pages.v_width), dtype=q.dtype, device=q.device)
        starts = batch.query_starts.tolist()
        contexts = batch.context_lens.tolist()
        for sequence, context in enumerate(contexts):
            table = batch.block_tables[sequence].tolist()
            first, end = starts[sequence], starts[sequence + 1]
            k = gather(pages.k, pages.k_scales, table, context)
            v = gather(pages.v, pages.v_scales, table, context)
            for row in range(first, end):
                position = context - (end - row)
                oldest = 0 if scoring.window is None else max(0, position - scoring.window + 1)
                seen = slice(oldest, position + 1)
                if position >= 0:
                    out[row] = attend(q[row], k[:, seen], v[:, seen], scoring)
        return out

    def write_latents(self, pages: LatentPages, latents: Tensor, batch: AttentionBatch) -> None:
        for token, slot in enumerate(batch.slot_mapping):
            if slot >= 0:
                pages.write(slot // pages.block_size, slot % pages.block_size, latents[token])

    def latent_attention(
        self, q: Tensor, pages: LatentPages, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """All heads share one key, the latent and its rotated features, of which the latent is the
        value as well."""
        out = q.new_zeros((*q.shape[:2], pages.rank))
        starts = batch.query_starts.tolist()
        for sequence, context in enumerate(batch.context_lens.tolist()):
            table = batch.block_tables[sequence].tolist()
            k = gather_latents(pages, table, context)
            first, end = starts[sequence], starts[sequence + 1]
            for row in range(first, end):
                seen = k[:, : context - (end - row) + 1]
                if seen.shape[1]:
                    out[row] = attend(q[row], seen, seen[..., : pages.rank], Scoring(scale))
        return out

    def expanded_attention(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        nope = q.shape[2] - k_rope.shape[1]
        k = torch.cat((kv[..., :nope], k_rope.unsqueeze(1).expand(-1, kv.shape[1], -1)), dim=2)
        k, v = k.transpose(0, 1).float(), kv[..., nope:].transpose(0, 1).float()
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        row = begin = 0
        for length, context in zip(batch.query_lens, batch.contexts, strict=True):
            for position in range(context - length, context):
                seen = slice(begin, begin + position + 1)
                out[row] = attend(q[row], k[:, seen], v[:, seen], Scoring(scale))
                row += 1
            begin += context
        return out

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        images = [cache[block].clone() for block in sources.tolist()]
        for block, image in zip(targets.tolist(), images, strict=True):
            cache[block] = image


def _write(pages: Tensor, scales: Tensor | None, block: int, offset: int, heads: Tensor) -> None:
    if scales is not None:
        heads, scales[block, :, offset] = quantise(heads)
    pages[block, :, offset] = heads


def gather(pages: Tensor, scales: Tensor | None, table: list[int], context: int) -> Tensor:
    """K or V `[kv_heads, context, width]` of one sequence, in float32, slot by slot."""
    _, heads, block_size, width = pages.shape
    found = pages.new_empty((heads, context, width), dtype=torch.float32)
    for position in range(context):
        block, offset = table[position // block_size], position % block_size
        stored = pages[block, :, offset]
        if scales is not None:
            stored = dequantise(stored, scales[block, :, offset])
        found[:, position] = stored
    return found


def gather_latents(pages: LatentPages, table: list[int], context: int) -> Tensor:
    """Latents and rotated features `[1, context, rank + rope]` of one sequence, in float32."""
    found = pages.rotated.new_empty((1, context, pages.rank + pages.rope), dtype=torch.float32)
    for position in range(context):
        block, offset = table[position // pages.block_size], position % pages.block_size
        slot = torch.tensor(block), torch.tensor(offset)
        found[0, position] = pages.read(*slot, torch.float32)
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """One token's heads `[heads, width]` against `[kv_heads, seen, width]`, in float32."""
    group = q.shape[0] // k.shape[0]
    out = q.new_empty((q.shape[0], v.shape[2]))
    for head in range(q.shape[0]):
        keys, values = k[head // group], v[head // group]
        scores = keys @ q[head].float() * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.sinks is not None:  # one more key, whose value is zero
            scores = torch.cat((scores, scoring.sinks[head : head + 1].float()))
            values = torch.cat((values, torch.zeros_like(values[:1])))
        out[head] = scores.softmax(dim=0) @ values
    return out
