"""`rotate.py` and `decode.py` in one launch, for one sequence with one new token.

A program turns the query heads that share its KV head. Its last tile is asked for before the kernel
ahead is done (`pdl.py`), and is most often its only one: earlier steps have written all of it. The
new token is not read from its page: the program that has the last split turns its key as well,
begins its sums with it, and writes it and its value where they belong.

With several sequences one may share a block that another's new token ends, in the same step: then
all tokens are to be written before any are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import is_fp8
from quire.kernels.pages import LayerPages
from quire.kernels.plain import Rotation
from quire.kernels.scoring import Scoring
from quire.kernels.triton.attention.combine import combine_splits
from quire.kernels.triton.attention.decode import LEAST_ROWS, Shape, shape_of
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits
from quire.kernels.triton.attention.softmax import (
    absorb,
    add_sink,
    average,
    scoring_arguments,
)
from quire.kernels.triton.attention.tiles import (
    fetch_tile,
    find_blocks,
    load_tile,
    page_arguments,
    values_of,
)
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import next_power_of_2

# A window of so many tokens is one tile, all of which is there before the product ahead is done.
_ONE_TILE = Shape(128, 8, 1, 1)


def can_rotate(qkv: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring) -> bool:
    """Whether it is one new token, and heads are as tensor cores take them."""
    if len(qkv) != 1 or batch.query_lens != [1] or is_fp8(pages.k) or scoring.softcap is not None:
        return False
    width, heads = pages.k_width, qkv.shape[1] // pages.k_width - 2 * pages.kv_heads
    is_even = width >= 16 and width == next_power_of_2(width) == pages.v_width
    is_half = qkv.dtype in (torch.float16, torch.bfloat16) and pages.k.dtype == qkv.dtype
    return is_even and is_half and heads // pages.kv_heads <= LEAST_ROWS and qkv.stride(1) == 1


def rotate_and_attend(
    qkv: Tensor,
    rotation: Rotation,
    pages: LayerPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scoring: Scoring,
    just_split: bool,
) -> Tensor:
    """What attention finds, `[tokens, heads, width]`, where it `can_rotate`."""
    width, kv_heads, window = pages.k_width, pages.kv_heads, scoring.window
    heads = qkv.shape[1] // width - 2 * kv_heads
    out = torch.empty((len(qkv), heads, width), dtype=qkv.dtype, device=qkv.device)
    shape, pdl = _shape(batch, pages, splits, window), pdl_launch(qkv.device)
    scale, _, sinks = scoring_arguments(scoring, qkv)
    _rotate_and_attend[(kv_heads, splits.count)](
        qkv,
        out,
        rotation.cos,
        rotation.sin,
        batch.slot_mapping,
        splits.table,
        splits.values,
        splits.lse,
        batch.block_tables,
        scale,
        sinks,
        qkv.stride(0),
        rotation.cos.stride(0),
        rotation.sin.stride(0),
        *page_arguments(pages)[:5],
        batch.block_tables.stride(0),
        just_split,
        HEADS=heads,
        KV_HEADS=kv_heads,
        ROWS=LEAST_ROWS,
        WIDTH=width,
        BLOCK_SIZE=pages.block_size,
        TILE=shape.tile,
        SINKS=scoring.sinks is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **pdl,
    )
    if not splits.are_whole:
        combine_splits(splits, batch, scoring.sinks, out, processors(qkv.device), pdl)
    return out


def _shape(batch: AttentionBatch, pages: LayerPages, splits: KVSplits, window: int | None) -> Shape:
    if splits.are_whole and window is not None and window <= _ONE_TILE.tile:
        return _ONE_TILE
    return shape_of(batch, pages, LEAST_ROWS, window)


@triton.jit(do_not_specialize=["table_stride", "just_split"])
def _rotate_and_attend(
    qkv,
    out,
    cos,
    sin,
    slots,
    splits_table,
    values,
    lse,
    block_tables,
    scale,
    sinks,
    token_stride,
    cos_stride,
    sin_stride,
    pages,
    block_stride,
    kv_stride,
    head_stride,
    slot_stride,
    table_stride,
    just_split,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if just_split:
        wait_then_trigger(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    field = splits_table + item * FIELDS
    # All at once, before the first is looked at: waiting for one after the other takes longer.
    sequence = tl.load(field).to(tl.int64)
    row = tl.load(field + 1).to(tl.int64)
    first = tl.load(field + 2)
    end = tl.load(field + 3)
    num_splits = tl.load(field + 4)
    new = tl.load(field + 6)  # the position of the new token; -1: it is padding
    head_pages = pages + kv_head * head_stride
    head_values = values_of(pages, kv_stride, kv_head, BLOCK_SIZE, WIDTH)
    table = block_tables + sequence * table_stride
    has_new = (end > new) & (new >= 0)
    end = tl.where(has_new, new, end)
    last = first + (tl.maximum(end - first, 1) - 1) // TILE * TILE  # where the last tile begins
    last_positions = last + tl.arange(0, TILE)
    last_k, last_v = load_tile(
        head_pages,
        head_values,
        find_blocks(table, last_positions, end, BLOCK_SIZE),
        last_positions,
        last_positions < end,
        block_stride,
        kv_stride,
        slot_stride,
        BLOCK_SIZE,
        WIDTH,
        WIDTH,
        WIDTH,
        WIDTH,
    )
    positions = first + tl.arange(0, TILE)
    if PDL and not just_split:
        if first < last:
            fetch_tile(
                head_pages,
                head_values,
                find_blocks(table, positions, last, BLOCK_SIZE),
                positions,
                positions < last,
                block_stride,
                kv_stride,
                slot_stride,
                BLOCK_SIZE,
                WIDTH,
                WIDTH,
                WIDTH,
                WIDTH,
            )
        wait_then_trigger(PDL)
    if sequence < 0:
        return

    blocks = find_blocks(table, positions, last, BLOCK_SIZE)
    slot = tl.load(slots + row)
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    head = kv_head * GROUP + lanes
    row_live = lanes < GROUP
    angles = tl.broadcast_to(dims[None, :], (ROWS, WIDTH))
    partner = tl.where(dims < WIDTH // 2, dims + WIDTH // 2, dims - WIDTH // 2)
    features = qkv + row * token_stride
    cosines, sines = cos + row * cos_stride, sin + row * sin_stride
    heads = features + head[:, None] * WIDTH
    query = _turn(
        heads + dims[None, :],
        heads + partner[None, :],
        cosines + angles,
        sines + angles,
        row_live[:, None],
    )
    # The condition is always true, which Triton does not know: it would else move all that a query
    # is computed from to where tensor cores read it, one after the other, and not the query.
    query = tl.where(lanes[:, None] < tl.where(sequence >= 0, ROWS, 0), query, 0.0)
    is_new = dims < tl.where(has_new, WIDTH, 0)
    of_key = features + (HEADS + kv_head) * WIDTH
    key = _turn(of_key + dims, of_key + partner, cosines + dims, sines + dims, is_new)
    value = tl.load(of_key + KV_HEADS * WIDTH + dims, mask=is_new, other=0.0)
    page = head_pages + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    is_written = is_new & (dims < tl.where(slot >= 0, WIDTH, 0))
    tl.store(page + dims, key, mask=is_written)
    tl.store(page + kv_stride + dims, value, mask=is_written)

    score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    begins = lanes < tl.where(has_new, ROWS, 0)
    top = tl.where(begins, score, -float("inf"))
    total = tl.where(begins, 1.0, 0.0)
    # It is zero where there is no new token.
    acc = (tl.broadcast_to(value.to(tl.float32)[None, :], (ROWS, WIDTH)),)
    for _ in range(first, last, TILE):
        k, v = load_tile(
            head_pages,
            head_values,
            blocks,
            positions,
            positions < last,
            block_stride,
            kv_stride,
            slot_stride,
            BLOCK_SIZE,
            WIDTH,
            WIDTH,
            WIDTH,
            WIDTH,
        )
        positions += TILE
        blocks = find_blocks(table, positions, last, BLOCK_SIZE)
        top, total, acc = _absorb(query, k, v, None, scale, top, total, acc, False)
    seen = (last_positions < end)[None, :]
    top, total, acc = _absorb(query, last_k, last_v, seen, scale, top, total, acc, True)

    if SINKS and num_splits == 1:
        total = add_sink(total, top, tl.load(sinks + head, mask=row_live, other=0.0))
    found = average(total, acc, False)
    if num_splits == 1:
        to = out + (row * HEADS + head[:, None]) * WIDTH + dims[None, :]
        tl.store(to, found.to(out.dtype.element_ty), mask=row_live[:, None])
    else:
        place = item * HEADS + head
        total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing of it: top is -inf
        tl.store(lse + place, top + tl.log2(total), mask=row_live)
        tl.store(values + place[:, None] * WIDTH + dims[None, :], found, mask=row_live[:, None])


@triton.jit
def _turn(x, y, cos, sin, live):
    """The numbers at `x` with their partners at `y`, as `rotate.py` turns them."""
    x = tl.load(x, mask=live, other=0.0)
    y = tl.load(y, mask=live, other=0.0).to(tl.float32)
    c = tl.load(cos, mask=live, other=0.0).to(tl.float32)
    s = tl.load(sin, mask=live, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * c + y * s).to(x.dtype)


@triton.jit
def _absorb(query, k, v, seen, scale, top, total, acc, MASKED: tl.constexpr):
    """`absorb` of numbers that have no scales, whose scores have no cap."""
    return absorb(
        (query,), k, v, None, None, seen, scale, 0.0, top, total, acc, MASKED, False, False, False
    )
