"""What the CPU backend works out once a step, so that each layer only gathers and multiplies.

A layer's K is read as a matrix whose rows are the pages of one head, `block_size * width` numbers
each, and which starts at the layer's first page. One `index_select` of such rows then yields
`[sequences, kv_heads, blocks * block_size, width]`, contiguous; and V alike. The row numbers are
the same for every layer. Where the distance between blocks is no multiple of a page, since K and V
differ in width, a page is several rows of the largest size that fits into both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LayerPages, PageShape

# Query rows per call of a prefill's attention. Keys above the diagonal are cut off tile by tile:
# measured faster than `is_causal` from 64 rows up, and it serves prefixes and windows as well.
TILE = 64

# Starting another group of decodes costs about as much as attending to this many padded tokens.
GROUP_COST = 512


@dataclass(frozen=True)
class PageRows:
    """Which rows to gather of the matrices of K and of V: int64 [sequences * kv_heads * blocks]."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class SlotRows:
    """Which tokens are written (None: all), and to which rows of the matrices of K and of V."""

    kept: Tensor | None
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each and similar lengths, attended to in one call."""

    rows: Tensor  # int64 [sequences]: their rows of q
    pages: PageRows
    length: int  # gathered tokens that are attended to: the longest sequence's
    mask: Tensor | None  # [sequences * kv_heads, 1, 1, length]: -inf where a sequence has no token
    live: Tensor | None  # int [sequences, 1, length - first_dead, 1]: all bits set, or none
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

    pages: PageRows
    tiles: list[Tile]


@dataclass(frozen=True)
class AttentionPlan:
    groups: list[DecodeGroup]
    prefills: list[PrefillTiles]
    is_one_group: bool  # the first group has every row of q, in order


def page_unit(shape: PageShape) -> int:
    """Numbers in a row of the matrix that pages are gathered from."""
    return gcd(shape.block_stride, shape.block_size * shape.width)


def slot_unit(shape: PageShape) -> int:
    """Numbers in a row of the matrix that tokens are written to."""
    return gcd(shape.block_stride, shape.width)


def plan_write(batch: AttentionBatch, pages: LayerPages) -> SlotRows:
    slots, kept = batch.slot_mapping, None
    if bool((slots < 0).any()):
        kept = (slots >= 0).nonzero().squeeze(1)
        slots = slots[kept]
    k = _slot_rows(slots, pages.k_shape)
    v = k if pages.v_shape == pages.k_shape else _slot_rows(slots, pages.v_shape)
    return SlotRows(kept, k, v)


def _slot_rows(slots: Tensor, shape: PageShape) -> Tensor:
    """Rows `[tokens, kv_heads, units of a head]`, flat."""
    unit = slot_unit(shape)
    block, offset = slots // shape.block_size, slots % shape.block_size
    first = block * shape.block_stride + offset * shape.width
    head = torch.arange(shape.kv_heads) * (shape.block_size * shape.width)
    numbers = first[:, None, None] + head[:, None] + torch.arange(0, shape.width, unit)
    return (numbers // unit).flatten()


def plan_attention(
    batch: AttentionBatch, pages: LayerPages, window: int | None, dtype: torch.dtype
) -> AttentionPlan:
    starts = batch.query_starts.tolist()
    live = [s for s, context in enumerate(batch.contexts) if context and batch.query_lens[s]]
    decodes = [s for s in live if batch.query_lens[s] == 1]
    prefills = [s for s in live if batch.query_lens[s] > 1]
    groups = [
        _decode_group(members, starts, batch, pages, window, dtype)
        for members in _by_length(decodes, batch.contexts, window)
    ]
    tiled = plan_prefills(prefills, batch, pages, window, dtype)
    is_one_group = len(groups) == 1 and len(groups[0].rows) == len(batch.slot_mapping)
    return AttentionPlan(groups, tiled, is_one_group)


def plan_prefills(
    sequences: list[int],
    batch: AttentionBatch,
    pages: LayerPages,
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
    return [_prefill_tiles(s, starts[s], batch, pages, window, band) for s in sequences]


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
    pages: LayerPages,
    window: int | None,
    dtype: torch.dtype,
) -> DecodeGroup:
    contexts = torch.tensor([batch.contexts[s] for s in members])
    oldest = torch.zeros_like(contexts) if window is None else (contexts - window).clamp(min=0)
    first_block = oldest // pages.block_size
    base = first_block * pages.block_size
    begin, end = oldest - base, contexts - base
    length = int(end.max())

    columns = first_block[:, None] + torch.arange(-(-length // pages.block_size))
    columns.clamp_(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[members].long().gather(1, columns)

    position = torch.arange(length)
    alive = (position >= begin[:, None]) & (position < end[:, None])
    mask = live = None
    first_dead = length
    if not bool(alive.all()):
        mask = torch.zeros(alive.shape, dtype=dtype).masked_fill_(~alive, -torch.inf)
        mask = mask[:, None].expand(-1, pages.kv_heads, -1).reshape(-1, 1, 1, length)
        first_dead = 0 if bool(begin.any()) else int(end.min())
        live = -alive[:, None, first_dead:, None].to(bits_of(dtype))
    rows = torch.tensor([starts[s] for s in members])
    return DecodeGroup(rows, _page_rows(blocks, pages), length, mask, live, first_dead)


def _prefill_tiles(
    sequence: int,
    first_row: int,
    batch: AttentionBatch,
    pages: LayerPages,
    window: int | None,
    band: Tensor,
) -> PrefillTiles:
    context, query_len = batch.contexts[sequence], batch.query_lens[sequence]
    cached = context - query_len
    oldest = 0 if window is None else max(0, cached - window + 1)
    first_block = oldest // pages.block_size
    base = first_block * pages.block_size
    blocks = batch.block_tables[sequence, first_block : -(-context // pages.block_size)].long()

    tiles = []
    for first in range(0, query_len, TILE):
        rows = min(TILE, query_len - first)
        end = cached + first + rows
        begin = 0 if window is None else max(0, cached + first - window + 1)
        mask = band[TILE - rows :, band.shape[1] - (end - begin) :]
        row = first_row + first
        tiles.append(Tile(slice(row, row + rows), slice(begin - base, end - base), mask))
    return PrefillTiles(_page_rows(blocks[None], pages), tiles)


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


def _page_rows(blocks: Tensor, pages: LayerPages) -> PageRows:
    """The rows of these blocks `[sequences, blocks]`."""
    k = _rows(blocks, pages.k_shape)
    return PageRows(k, k if pages.v_shape == pages.k_shape else _rows(blocks, pages.v_shape))


def _rows(blocks: Tensor, shape: PageShape) -> Tensor:
    """Rows `[sequences, kv_heads, blocks, units of a page]`, flat."""
    unit, page = page_unit(shape), shape.block_size * shape.width
    head = torch.arange(shape.kv_heads)[:, None, None] * page
    first = blocks[:, None, :, None] * shape.block_stride + head
    return ((first + torch.arange(0, page, unit)) // unit).flatten()


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same size."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
