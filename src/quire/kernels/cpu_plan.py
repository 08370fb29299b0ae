"""What the CPU backend works out once a step, so that each layer only gathers and multiplies.

The pool is read as a matrix with one row for each (block, layer, K or V, head), each row being
`block_size * head_dim` numbers. One `index_select` of such rows then yields K and V as
`[2, sequences, kv_heads, blocks * block_size, head_dim]`, contiguous. The row numbers are those of
layer 0: another layer's are the same in the matrix that starts at its first row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch

# Query rows per call of a prefill's attention. Keys above the diagonal are cut off tile by tile:
# measured faster than `is_causal` from 64 rows up, and it serves prefixes and windows as well.
TILE = 64

# Starting another group of decodes costs about as much as attending to this many padded tokens.
GROUP_COST = 512


class Geometry(NamedTuple):
    """The pool's shape: `Geometry(*cache.shape)`."""

    num_blocks: int
    num_layers: int
    kv_dim: int
    kv_heads: int
    block_size: int
    head_dim: int


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each and similar lengths, attended to in one call."""

    rows: Tensor  # int64 [sequences]: their rows of q
    pages: Tensor  # int64 [2 * sequences * kv_heads * blocks]: rows of the pool
    width: int  # gathered tokens that are attended to: the longest sequence's
    mask: Tensor | None  # [sequences * kv_heads, 1, 1, width]: -inf where a sequence has no token
    live: Tensor | None  # int [sequences, 1, width - first_dead, 1]: all bits set, or none
    first_dead: int  # the first column where any sequence has no token


@dataclass(frozen=True)
class Tile:
    """Consecutive query rows of a prefill, and the gathered tokens they see."""

    rows: slice
    keys: slice
    mask: Tensor


@dataclass(frozen=True)
class PrefillTiles:
    """One sequence with several new tokens."""

    pages: Tensor  # int64 [2 * kv_heads * blocks]: rows of the pool
    tiles: list[Tile]


@dataclass(frozen=True)
class AttentionPlan:
    groups: list[DecodeGroup]
    prefills: list[PrefillTiles]
    is_one_group: bool  # the first group has every row of q, in order


def plan_write(batch: AttentionBatch, shape: Geometry) -> tuple[Tensor | None, Tensor]:
    """Which tokens are kept (None: all), and the rows of `head_dim` numbers their K goes to.

    The pool is written as a matrix with a row for each (block, layer, K or V, head, offset).
    """
    slots, kept = batch.slot_mapping, None
    if bool((slots < 0).any()):
        kept = (slots >= 0).nonzero().squeeze(1)
        slots = slots[kept]
    block_rows = shape.num_layers * shape.kv_dim * shape.kv_heads * shape.block_size
    first = slots // shape.block_size * block_rows + slots % shape.block_size
    rows = first[:, None] + torch.arange(shape.kv_heads) * shape.block_size
    return kept, rows.flatten()


def plan_attention(
    batch: AttentionBatch, shape: Geometry, window: int | None, dtype: torch.dtype
) -> AttentionPlan:
    starts = batch.query_starts.tolist()
    live = [s for s, context in enumerate(batch.contexts) if context and batch.query_lens[s]]
    decodes = [s for s in live if batch.query_lens[s] == 1]
    prefills = [s for s in live if batch.query_lens[s] > 1]
    groups = [
        _decode_group(members, starts, batch, shape, window, dtype)
        for members in _by_length(decodes, batch.contexts, window)
    ]
    tiled = plan_prefills(prefills, batch, shape, window, dtype)
    is_one_group = len(groups) == 1 and len(groups[0].rows) == len(batch.slot_mapping)
    return AttentionPlan(groups, tiled, is_one_group)


def plan_prefills(
    sequences: list[int],
    batch: AttentionBatch,
    shape: Geometry,
    window: int | None,
    dtype: torch.dtype,
) -> list[PrefillTiles]:
    if not sequences:
        return []
    starts = batch.query_starts.tolist()
    widest = max(batch.contexts[s] for s in sequences)
    if window is not None:
        widest = min(widest, window - 1 + TILE)
    band = _band(widest, window, dtype)
    return [_prefill_tiles(s, starts[s], batch, shape, window, band) for s in sequences]


def _by_length(sequences: list[int], contexts: list[int], window: int | None) -> list[list[int]]:
    """Cut the sequences, longest first, wherever padding would cost more than a new group."""
    groups: list[list[int]] = []
    longest = padding = 0
    for s in sorted(sequences, key=lambda s: -contexts[s]):
        length = contexts[s] if window is None else min(contexts[s], window)
        padding += longest - length
        if not groups or padding > GROUP_COST:
            groups.append([])
            longest, padding = length, 0
        groups[-1].append(s)
    return [sorted(group) for group in groups]


def _decode_group(
    members: list[int],
    starts: list[int],
    batch: AttentionBatch,
    shape: Geometry,
    window: int | None,
    dtype: torch.dtype,
) -> DecodeGroup:
    contexts = torch.tensor([batch.contexts[s] for s in members])
    oldest = torch.zeros_like(contexts) if window is None else (contexts - window).clamp(min=0)
    first_block = oldest // shape.block_size
    base = first_block * shape.block_size
    begin, end = oldest - base, contexts - base
    width = int(end.max())

    columns = first_block[:, None] + torch.arange(-(-width // shape.block_size))
    columns.clamp_(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[members].long().gather(1, columns)

    position = torch.arange(width)
    alive = (position >= begin[:, None]) & (position < end[:, None])
    mask = live = None
    first_dead = width
    if not bool(alive.all()):
        mask = torch.zeros(alive.shape, dtype=dtype).masked_fill_(~alive, -torch.inf)
        mask = mask[:, None].expand(-1, shape.kv_heads, -1).reshape(-1, 1, 1, width)
        first_dead = 0 if bool(begin.any()) else int(end.min())
        live = -alive[:, None, first_dead:, None].to(bits_of(dtype))
    rows = torch.tensor([starts[s] for s in members])
    return DecodeGroup(rows, _pages(blocks, shape), width, mask, live, first_dead)


def _prefill_tiles(
    sequence: int,
    first_row: int,
    batch: AttentionBatch,
    shape: Geometry,
    window: int | None,
    band: Tensor,
) -> PrefillTiles:
    context, query_len = batch.contexts[sequence], batch.query_lens[sequence]
    cached = context - query_len
    oldest = 0 if window is None else max(0, cached - window + 1)
    first_block = oldest // shape.block_size
    base = first_block * shape.block_size
    blocks = batch.block_tables[sequence, first_block : -(-context // shape.block_size)].long()

    tiles = []
    for first in range(0, query_len, TILE):
        rows = min(TILE, query_len - first)
        end = cached + first + rows
        begin = 0 if window is None else max(0, cached + first - window + 1)
        mask = band[TILE - rows :, band.shape[1] - (end - begin) :]
        row = first_row + first
        tiles.append(Tile(slice(row, row + rows), slice(begin - base, end - base), mask))
    return PrefillTiles(_pages(blocks[None], shape), tiles)


def _band(width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What the last `TILE` rows of `width` tokens see: 0 where they do, -inf where not.

    Any tile's mask is the bottom right corner of it, of the tile's own size.
    """
    row = torch.arange(width - TILE, width)[:, None]
    key = torch.arange(width)
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _pages(blocks: Tensor, shape: Geometry) -> Tensor:
    """Rows of the pool `[2, sequences, kv_heads, blocks]` in layer 0, flat."""
    block_rows = shape.num_layers * shape.kv_dim * shape.kv_heads
    kv_head = torch.arange(2 * shape.kv_heads).view(2, 1, shape.kv_heads, 1)
    return (blocks[:, None] * block_rows + kv_head).flatten()


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same size."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
