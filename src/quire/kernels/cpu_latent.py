"""Latent attention (MLA) on a CPU, with torch's products: one sequence after the other.

All heads share what is gathered of a sequence, so that its new tokens with all heads are the rows
of one matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages

TOKENS = 64  # new tokens that are attended at once: keys behind them are left out


def write_latents(pages: LatentPages, latents: Tensor, batch: AttentionBatch) -> None:
    slots = batch.slot_mapping
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, latents = slots[kept], latents[kept]
    pages.write(slots // pages.block_size, slots % pages.block_size, latents)


def latent_attention(q: Tensor, pages: LatentPages, batch: AttentionBatch, scale: float) -> Tensor:
    out = q.new_zeros((*q.shape[:2], pages.rank))
    row = 0
    for sequence, (length, context) in enumerate(
        zip(batch.query_lens, batch.contexts, strict=True)
    ):
        if length and context:
            count = -(-context // pages.block_size)
            blocks = batch.block_tables[sequence, :count]
            keys = _gather(pages, blocks, q.dtype)[:context]
            for rows, seen, hidden in tiles(row, length, context):
                new = q[rows].flatten(0, 1)
                scores = (new @ keys[:seen].T).float().mul_(scale).view(-1, q.shape[1], seen)
                if hidden is not None:
                    scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
                weights = scores.softmax(-1).to(q.dtype)
                out[rows] = weights @ keys[:seen, : pages.rank]
        row += length
    return out


def _gather(pages: LatentPages, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """All slots of these blocks, end to end."""
    if pages.scales is None:
        return pages.values.index_select(0, blocks).flatten(0, 1)
    slots = torch.arange(pages.block_size)
    return pages.read(blocks.long().unsqueeze(1), slots, dtype).flatten(0, 1)


def expanded_attention(
    q: Tensor, kv: Tensor, k_rope: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    heads, nope = q.shape[1], q.shape[2] - k_rope.shape[1]
    out = q.new_empty((len(q), heads, kv.shape[2] - nope))
    row = begin = 0
    for length, context in zip(batch.query_lens, batch.contexts, strict=True):
        own = slice(begin, begin + context)
        shared = k_rope[own].unsqueeze(1).expand(-1, heads, -1)
        k = torch.cat((kv[own, :, :nope], shared), dim=2).transpose(0, 1)
        v = kv[own, :, nope:].transpose(0, 1)
        for rows, seen, hidden in tiles(row, length, context):
            mask = None if hidden is None else ~hidden
            found = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1), k[:, :seen], v[:, :seen], mask, scale=scale
            )
            out[rows] = found.transpose(0, 1)
        row, begin = row + length, begin + context
    return out


def tiles(row: int, length: int, context: int) -> list[tuple[slice, int, Tensor | None]]:
    """Rows of q, how many keys the last of them sees, and what is hidden of these from each."""
    found: list[tuple[slice, int, Tensor | None]] = []
    for first in range(0, length, TOKENS):
        count = min(TOKENS, length - first)
        seen = context - length + first + count
        position = torch.arange(seen - count, seen)
        hidden = torch.arange(seen) > position[:, None] if count > 1 else None
        found.append((slice(row + first, row + first + count), seen, hidden))
    return found
