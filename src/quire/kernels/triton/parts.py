"""How decodes are cut into parts for programs: on the device, once for all layers.

A part is some of one sequence's tokens, whole tiles of them. There is a share of all tiles that
would keep the whole GPU busy once; a sequence is cut into as few even parts as have no more than
that share each. So a lone long sequence fills the GPU, and many short ones are not cut at all.
Parts of long sequences among many are cut smaller: the GPU hands programs out as others end, and
the last ones to end should be short.

There are never more parts than sequences and shares together: what a grid and its buffers are made
for holds for every length that a captured graph may meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch

FIELDS: tl.constexpr = tl.constexpr(8)  # sequence, row, first token, end, parts, 3 unused
_PARTS_PER_PROGRAM = 64
_SEQUENCES_AT_ONCE = 128
_LONG = 1024  # tokens: no part among many is cut shorter than this


@dataclass(frozen=True)
class Parts:
    """Who computes what, and where it is left until all parts of a sequence are put together."""

    count: int
    list: Tensor  # int32 [count, FIELDS]; the sequence is -1 where there is no part
    owners: Tensor  # int32 [sequences, 2]: the first part of each, and how many there are
    values: Tensor  # float32 [count, heads, head_dim]
    shares: Tensor  # float32 [count, heads]: log 2 of the part's share of the softmax


def cut(
    batch: AttentionBatch, q: Tensor, groups: int, programs: int, tile: int, window: int | None
) -> Parts:
    """The parts of `batch`, where `programs` keep the GPU busy; each of `groups` groups of heads
    has a program for every part."""
    sequences, (_, heads, head_dim) = len(batch.query_lens), q.shape
    few = max(1, programs // groups)
    many = max(few, 2 * sequences)
    count = sequences + many
    parts = Parts(
        count,
        q.new_empty(count, FIELDS.value, dtype=torch.int32),
        q.new_empty(sequences, 2, dtype=torch.int32),
        q.new_empty(count, heads, head_dim, dtype=torch.float32),
        q.new_empty(count, heads, dtype=torch.float32),
    )
    _cut[(triton.cdiv(count, _PARTS_PER_PROGRAM),)](
        batch.query_starts,
        batch.context_lens,
        parts.list,
        parts.owners,
        sequences,
        count,
        few,
        many,
        TILE=tile,
        LONG=max(1, _LONG // tile),
        WINDOW=window or 0,
        PARTS=_PARTS_PER_PROGRAM,
        SEQUENCES=_SEQUENCES_AT_ONCE,
    )
    return parts


@triton.jit(do_not_specialize=["sequences", "count", "few", "many"])
def _cut(
    query_starts,
    context_lens,
    parts_list,
    owners,
    sequences,
    count,
    few,
    many,
    TILE: tl.constexpr,
    LONG: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """A program writes some of the list, and finds their sequences from all lengths."""
    total = 0
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        total += tl.sum(_tiles(query_starts, context_lens, sequence, live, TILE, WINDOW), 0)
    share = tl.maximum(tl.cdiv(total, many), tl.minimum(tl.cdiv(total, few), LONG))
    share = tl.maximum(share, 1)

    item = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    owner = tl.zeros([PARTS], tl.int32)  # sequences whose parts all come before the item
    before = tl.zeros([PARTS], tl.int32)  # and how many parts they have
    base = 0
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        tiles = _tiles(query_starts, context_lens, sequence, live, TILE, WINDOW)
        ends = base + tl.cumsum(tl.cdiv(tiles, share), 0)
        passed = (ends[None, :] <= item[:, None]) & live[None, :]
        owner += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        base += tl.sum(tl.cdiv(tiles, share), 0)

    live = owner < sequences
    tiles = _tiles(query_starts, context_lens, owner, live, TILE, WINDOW)
    parts = tl.maximum(tl.cdiv(tiles, share), 1)
    part = item - before
    context = tl.load(context_lens + owner, mask=live, other=0)
    oldest = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else tl.zeros_like(context)
    length = tl.cdiv(tiles, parts) * TILE
    first = oldest + part * length

    field = parts_list + item * FIELDS
    inside = item < count
    tl.store(field, tl.where(live, owner, -1), mask=inside)
    tl.store(field + 1, tl.load(query_starts + owner, mask=live, other=0), mask=inside)
    tl.store(field + 2, first, mask=inside)
    tl.store(field + 3, tl.minimum(first + length, context), mask=inside)
    tl.store(field + 4, parts, mask=inside)
    begins = live & (part == 0)
    tl.store(owners + owner * 2, item, mask=begins)
    tl.store(owners + owner * 2 + 1, parts, mask=begins)


@triton.jit
def _tiles(query_starts, context_lens, sequence, live, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The tiles that each sequence sees: none with more than one new token, else at least one,
    for the output of a padded row is written too."""
    seen = tl.load(context_lens + sequence, mask=live, other=0)
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    first = tl.load(query_starts + sequence, mask=live, other=0)
    end = tl.load(query_starts + sequence + 1, mask=live, other=0)
    return tl.where(live & (end - first == 1), tl.maximum(tl.cdiv(seen, TILE), 1), 0)
