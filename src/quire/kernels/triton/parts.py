"""How decodes are dealt out to programs: evenly, on the device, once for all layers.

The tiles of all sequences are laid end to end and cut into as many equal shares as there are
programs. A share may begin inside a sequence and end inside another; what it has of one is a part:

    tiles     | sequence 0      | 1   | sequence 2                  | 3 |
    shares    |          0          |         1           |         2   |
    parts     |        0        | 1 |2|         3         |    4    | 5 |

So every program has the same work, be it of one long sequence or of many short ones. There are
never more parts than sequences and shares together: what a grid and its buffers are made for holds
for every length that a captured graph may meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch

FIELDS: tl.constexpr = tl.constexpr(8)  # sequence, row, first token, end, part, parts, 2 unused
_PARTS_PER_PROGRAM = 64
_SEQUENCES_AT_ONCE = 128


@dataclass(frozen=True)
class Parts:
    """Who computes what, and where programs leave what the last of a sequence puts together."""

    programs: int
    starts: Tensor  # int32 [programs + 1]: the first part of each
    list: Tensor  # int32 [most parts, FIELDS]
    arrivals: Tensor  # int32 [sequences, groups]: parts that are done; 0 between launches
    values: Tensor  # float32 [most parts, heads, head_dim]
    shares: Tensor  # float32 [most parts, heads]: log 2 of the part's share of the softmax


def deal(
    batch: AttentionBatch, q: Tensor, groups: int, programs: int, tile: int, window: int | None
) -> Parts:
    """The parts of `batch` for `programs` programs; each of `groups` groups of heads has as many."""
    sequences, (_, heads, head_dim) = len(batch.query_lens), q.shape
    most = sequences + programs
    integers = {"dtype": torch.int32, "device": q.device}
    floats = {"dtype": torch.float32, "device": q.device}
    parts = Parts(
        programs,
        torch.empty(programs + 1, **integers),
        torch.empty(most, FIELDS.value, **integers),
        torch.empty(sequences, groups, **integers),
        torch.empty(most, heads, head_dim, **floats),
        torch.empty(most, heads, **floats),
    )
    _deal[(triton.cdiv(most, _PARTS_PER_PROGRAM),)](
        batch.query_starts,
        batch.context_lens,
        parts.starts,
        parts.list,
        parts.arrivals,
        sequences,
        PROGRAMS=programs,
        GROUPS=groups,
        TILE=tile,
        WINDOW=window or 0,
        PARTS=_PARTS_PER_PROGRAM,
        SEQUENCES=_SEQUENCES_AT_ONCE,
        WIDTH=triton.next_power_of_2(programs + 1),
    )
    return parts


@triton.jit(do_not_specialize=["sequences"])
def _deal(
    query_starts,
    context_lens,
    starts,
    parts_list,
    arrivals,
    sequences,
    PROGRAMS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program writes some of the list, and finds their sequences from all lengths."""
    all_tiles = 0
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        tiles = _tiles(query_starts, context_lens, sequence, live, TILE, WINDOW)
        all_tiles += tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(all_tiles, PROGRAMS), 1)

    item = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    owner = tl.zeros([PARTS], tl.int32)  # sequences whose parts all come before the item,
    parts_before = tl.zeros([PARTS], tl.int32)  # their parts,
    tiles_before = tl.zeros([PARTS], tl.int32)  # and their tiles
    all_parts = 0
    base = 0
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        tiles = _tiles(query_starts, context_lens, sequence, live, TILE, WINDOW)
        ends = base + tl.cumsum(tiles, 0)
        parts = _parts(ends - tiles, tiles, share)
        parts_ends = all_parts + tl.cumsum(parts, 0)
        passed = (parts_ends[None, :] <= item[:, None]) & live[None, :]
        owner += tl.sum(passed.to(tl.int32), 1)
        parts_before = tl.maximum(parts_before, tl.max(tl.where(passed, parts_ends[None, :], 0), 1))
        tiles_before = tl.maximum(tiles_before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        base += tl.sum(tiles, 0)
        all_parts += tl.sum(parts, 0)

    live = owner < sequences
    tiles = _tiles(query_starts, context_lens, owner, live, TILE, WINDOW)
    part = item - parts_before
    cut = (tiles_before // share + part) * share  # where the part's share begins
    first = tl.maximum(cut, tiles_before)
    end = tl.minimum(cut + share, tiles_before + tiles)
    tl.store(starts + first // share, item, mask=live & (first == cut))
    context = tl.load(context_lens + owner, mask=live, other=0)
    oldest = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else tl.zeros_like(context)

    field = parts_list + item * FIELDS
    tl.store(field, owner, mask=live)
    tl.store(field + 1, tl.load(query_starts + owner, mask=live, other=0), mask=live)
    tl.store(field + 2, oldest + (first - tiles_before) * TILE, mask=live)
    tl.store(field + 3, tl.minimum(oldest + (end - tiles_before) * TILE, context), mask=live)
    tl.store(field + 4, part, mask=live)
    tl.store(field + 5, _parts(tiles_before, tiles, share), mask=live)
    for group in range(GROUPS):
        tl.store(arrivals + item * GROUPS + group, 0, mask=item < sequences)
    if tl.program_id(0) == 0:  # programs without work, and the end of the last that has some
        program = tl.arange(0, WIDTH)
        idle = (program <= PROGRAMS) & (program * share >= all_tiles)
        tl.store(starts + program, all_parts, mask=idle)


@triton.jit
def _parts(first, tiles, share):
    """Into how many parts a sequence falls whose tiles begin at `first`."""
    return tl.where(tiles > 0, (first + tiles - 1) // share - first // share + 1, 0)


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
