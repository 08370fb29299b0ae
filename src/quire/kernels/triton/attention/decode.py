"""Attention of sequences with few new tokens: split-KV, so that few sequences can fill a GPU.

One program takes one split of one sequence's tokens (`kv_splits.py`) for one KV head, with all
query heads that share it: K and V are read once. Its rows are the new tokens with each of these
heads, row r being token r // group, head r % group. A second kernel combines the splits of a
sequence (`combine.py`). Lengths are read on the device, so the launches can be captured in a graph
and replayed as sequences grow.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import is_fp8
from quire.kernels.pages import LayerPages
from quire.kernels.scoring import Scoring
from quire.kernels.triton.attention.combine import combine_splits
from quire.kernels.triton.attention.fp8_choice import reads_words
from quire.kernels.triton.attention.fp8_pairs import has_conversion
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits, split_kv
from quire.kernels.triton.attention.softmax import (
    absorb,
    add_sink,
    average,
    nothing_yet,
    scoring_arguments,
)
from quire.kernels.triton.attention.tiles import (
    fetch_tile,
    find_blocks,
    head_width,
    load_kv,
    load_query,
    page_arguments,
    tile_tokens,
    values_of,
)
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv, next_power_of_2

SPAN = 16  # new tokens that a sequence may have here …
MOST_SEQUENCES = 64  # … in a batch of so few; in one of more, one: what is set aside grows alike

# Rows of a program: the least that tensor cores take, and the most.
LEAST_ROWS, _MOST_ROWS = 16, 64


class Shape(NamedTuple):
    """A program's tokens of a tile, warps, stages of its loop; and how many programs keep a
    processor busy."""

    tile: int
    warps: int
    stages: int
    programs: int


# By whether there are few sequences, measured on an H200: many have few splits each, and then
# small programs are spread more evenly; few have many, and then each program's start counts.
_FEW_SEQUENCES = 16
_SHAPES = {True: Shape(64, 4, 3, 2), False: Shape(32, 4, 4, 4)}
# Heads of 65 to 128 in 16 bits: larger tiles are 3 to 8 % faster with up to so many sequences, and
# with more of them two stages 1 to 3 %. The shapes above are for smaller heads then.
_SOME_SEQUENCES = 192
_SHAPE_OF_SOME, _SHAPE_OF_MANY = Shape(64, 4, 3, 3), Shape(64, 4, 2, 4)
_FP8_SHAPES = {True: Shape(64, 2, 3, 4), False: Shape(32, 1, 3, 8)}
_MANY_ROWS_SHAPE = Shape(64, 4, 3, 2)
# Windows of one or two tiles leave no loop to load ahead for: small programs, of which more run at
# once. Measured with small heads and many sequences.
_SHORT_WINDOW, _SHORT_WINDOW_SHAPE = 128, Shape(64, 2, 2, 4)


def span_of(query_lens: list[int]) -> int:
    """The most new tokens of a sequence that `decode_attention` should take in such a batch."""
    if len(query_lens) > MOST_SEQUENCES:
        return 1
    return SPAN if any(1 < length <= SPAN for length in query_lens) else 1


def split_decodes(
    batch: AttentionBatch, q: Tensor, pages: LayerPages, window: int | None, span: int
) -> KVSplits:
    """What `decode_attention` works by; the same for all layers with this window."""
    kv_heads, width = pages.kv_heads, pages.v_width
    rows = _rows(q, pages, span)
    shape = shape_of(batch, pages, rows, window)
    tile, busy = shape.tile, shape.programs
    if _goes_to_registers(q, pages, batch, window, span):
        from quire.kernels.triton.attention.hopper_fp8_decode import SHAPE

        tile, busy = SHAPE.tile, SHAPE.programs
    programs = max(1, processors(q.device) * busy // kv_heads)
    group = q.shape[1] // kv_heads
    return split_kv(batch, q, width, programs, tile, group, rows, window, span)


def decode_attention(
    q: Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scoring: Scoring,
    out: Tensor,
    just_split: bool,
) -> None:
    """Fill the rows of `out` that belong to sequences with one row, or as many as `splits` span.

    Unless the splits were `just_split`, by the kernel ahead, their first tiles are fetched while
    that one ends: all of a window that is not split, where there are few.
    """
    heads, kv_heads, window = q.shape[1], pages.kv_heads, scoring.window
    rows = _rows(q, pages, splits.span)
    row_tiles = cdiv(splits.span * heads // kv_heads, rows)
    shape = shape_of(batch, pages, rows, window)
    pdl = pdl_launch(q.device)
    if _goes_to_registers(q, pages, batch, window, splits.span):
        from quire.kernels.triton.attention.hopper_fp8_decode import SHAPE, attend

        attend(q, pages, batch, splits, scoring, out, just_split, SHAPE)
        combine_splits(splits, batch, scoring.sinks, out, processors(q.device), pdl)
        return
    _attend[(kv_heads, splits.count, row_tiles)](
        q,
        out,
        splits.table,
        splits.values,
        splits.lse,
        batch.block_tables,
        *scoring_arguments(scoring, q),
        *q.stride(),
        *page_arguments(pages),
        *out.stride()[:2],
        batch.block_tables.stride(0),
        just_split,
        HEADS=heads,
        GROUP=heads // kv_heads,
        SPAN=splits.span,
        ROWS=rows,
        HEAD_DIM=pages.k_width,
        HEAD_WIDTH=head_width(pages.k),
        V_DIM=pages.v_width,
        V_WIDTH=head_width(pages.v),
        BLOCK_SIZE=pages.block_size,
        TILE=shape.tile,
        FETCHED=_tiles_fetched(batch, splits, shape, window),
        WINDOW=0 if window is None or splits.span == 1 else window,
        CAPPED=scoring.softcap is not None,
        SINKS=scoring.sinks is not None,
        SCALED=pages.k_scales is not None,
        CONVERTS=has_conversion(q.device),
        num_warps=shape.warps,
        num_stages=shape.stages,
        **pdl,
    )
    if not splits.are_whole:
        combine_splits(splits, batch, scoring.sinks, out, processors(q.device), pdl)


def _tiles_fetched(
    batch: AttentionBatch, splits: KVSplits, shape: Shape, window: int | None
) -> int:
    """Of few sequences' windows all, up to as many as a short one has; else a split's first."""
    if window is None or not splits.are_whole or len(batch.query_lens) > _FEW_SEQUENCES:
        return 1
    return min(4, cdiv(window + splits.span - 1, shape.tile))


def _goes_to_registers(
    q: Tensor, pages: LayerPages, batch: AttentionBatch, window: int | None, span: int
) -> bool:
    """Few sequences have many splits, and more of smaller programs would mean more to combine."""
    return len(batch.query_lens) > _FEW_SEQUENCES and reads_words(q, pages, window, span)


def shape_of(batch: AttentionBatch, pages: LayerPages, rows: int, window: int | None) -> Shape:
    """For heads of 128: tiles of small ones are longer, and large ones get more warps."""
    shapes = _FP8_SHAPES if is_fp8(pages.k) else _SHAPES
    sequences, width = len(batch.query_lens), head_width(pages.k)
    are_few = sequences <= _FEW_SEQUENCES
    shape = shapes[are_few]
    if rows > LEAST_ROWS and not is_fp8(pages.k):
        shape = _MANY_ROWS_SHAPE
    elif width == 128 and pages.k.element_size() == 2 and not are_few:
        shape = _SHAPE_OF_SOME if sequences <= _SOME_SEQUENCES else _SHAPE_OF_MANY
    elif window is not None and window <= _SHORT_WINDOW and width <= 64 and not are_few:
        return _SHORT_WINDOW_SHAPE
    tile = min(64, shape.tile * max(1, 128 // width))
    warps = min(4, shape.warps * max(1, width // 128))
    return shape._replace(tile=tile_tokens(pages, tile), warps=warps)


def _rows(q: Tensor, pages: LayerPages, span: int) -> int:
    """Rows of a program. Where a sequence has more, each program reads K and V anew.

    That costs less than more rows than a group has, if numbers are turned from fp8 first: tensor
    cores that work on many rows want them in shared memory. For float32 there are none.
    """
    group = q.shape[1] // pages.kv_heads
    together = span if q.element_size() == 2 and not is_fp8(pages.k) else 1
    wanted = next_power_of_2(together * group)
    return min(_MOST_ROWS, max(LEAST_ROWS, wanted))


@triton.jit(do_not_specialize=["table_stride", "just_split"])
def _attend(
    q,
    out,
    splits_table,
    values,
    lse,
    block_tables,
    scale,
    cap,
    sinks,
    q_row_stride,
    q_head_stride,
    q_dim_stride,
    pages,
    block_stride,
    kv_stride,
    head_stride,
    slot_stride,
    scales,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
    out_row_stride,
    out_head_stride,
    table_stride,
    just_split,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FETCHED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    NUMBERS: tl.constexpr = 2 if SCALED else 1  # in an element of `pages`
    if just_split:
        wait_then_trigger(PDL)
    item = tl.program_id(1)
    field = splits_table + item * FIELDS
    # All at once, before the first is looked at: waiting for one after the other takes longer.
    sequence = tl.load(field).to(tl.int64)
    row = tl.load(field + 1).to(tl.int64)
    first = tl.load(field + 2)
    end = tl.load(field + 3)
    num_splits = tl.load(field + 4)
    length = tl.load(field + 5)
    start = tl.load(field + 6)
    kv_head = tl.program_id(0)
    lane = tl.program_id(2) * ROWS  # last: most sequences have no more rows than the first programs
    ours = (sequence >= 0) & (lane // GROUP < length)
    head_pages = pages + kv_head * head_stride
    head_values = values_of(pages, kv_stride, kv_head, BLOCK_SIZE, V_DIM // NUMBERS)
    table = block_tables + sequence * table_stride
    positions = first + tl.arange(0, TILE)
    if PDL and not just_split:
        if ours:
            for tile in tl.static_range(FETCHED):
                wanted = positions + tile * TILE
                fetch_tile(
                    head_pages,
                    head_values,
                    find_blocks(table, wanted, end, BLOCK_SIZE),
                    wanted,
                    wanted < end,
                    block_stride,
                    kv_stride,
                    slot_stride,
                    BLOCK_SIZE,
                    HEAD_DIM // NUMBERS,
                    HEAD_WIDTH // NUMBERS,
                    V_DIM // NUMBERS,
                    V_WIDTH // NUMBERS,
                )
        wait_then_trigger(PDL)
    if not ours:
        return

    lanes = lane + tl.arange(0, ROWS)
    token = lanes // GROUP
    head = kv_head * GROUP + lanes % GROUP
    row_live = token < length
    head_scales = scales + kv_head * scale_head_stride
    blocks = find_blocks(table, positions, end, BLOCK_SIZE)
    rows = q + (row + token) * q_row_stride + head * q_head_stride
    query = load_query(rows, row_live, q_dim_stride, HEAD_DIM, HEAD_WIDTH, SCALED)
    top, total, acc = nothing_yet(ROWS, V_WIDTH, SCALED)
    for _ in range(first, end, TILE):
        live = positions < end
        seen = live[None, :]
        if SPAN > 1:
            seen &= positions[None, :] <= (start + token)[:, None]
            if WINDOW > 0:
                seen &= positions[None, :] > (start + token)[:, None] - WINDOW
        k, v, k_scale, v_scale = load_kv(
            head_pages,
            head_values,
            head_scales,
            blocks,
            positions,
            live,
            block_stride,
            kv_stride,
            slot_stride,
            scale_block_stride,
            scale_kv_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            HEAD_WIDTH,
            V_DIM,
            V_WIDTH,
            SCALED,
        )
        positions += TILE
        blocks = find_blocks(table, positions, end, BLOCK_SIZE)
        top, total, acc = absorb(
            query,
            k,
            v,
            k_scale,
            v_scale,
            seen,
            scale,
            cap,
            top,
            total,
            acc,
            True,
            CAPPED,
            SCALED,
            CONVERTS,
        )

    if SINKS and num_splits == 1:
        total = add_sink(total, top, tl.load(sinks + head, mask=row_live, other=0.0))
    value = average(total, acc, SCALED)
    dims = tl.arange(0, V_WIDTH)
    live = row_live[:, None] & (dims < V_DIM)[None, :]
    if num_splits == 1:
        rows = out + (row + token) * out_row_stride + head * out_head_stride
        tl.store(rows[:, None] + dims[None, :], value.to(out.dtype.element_ty), mask=live)
    else:
        place = (item * SPAN + token) * HEADS + head
        total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing of it: top is -inf
        tl.store(lse + place, top + tl.log2(total), mask=row_live)
        tl.store(values + place[:, None] * V_DIM + dims[None, :], value, mask=live)
