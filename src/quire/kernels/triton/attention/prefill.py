"""Attention of sequences with many new tokens, over a cached prefix and the tokens themselves.

One program takes a few consecutive tokens with all query heads that share a KV head, as the rows of
one tile (row r is token r // group, head r % group), and walks the tokens they can see.

Sequences differ in length, so programs find their own: sequence s has the tiles from
`query_starts[s] // tokens + s` on, which are always enough, and the first number of the next.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LayerPages
from quire.kernels.scoring import Scoring
from quire.kernels.triton.attention.fp8_pairs import has_conversion
from quire.kernels.triton.attention.softmax import (
    absorb,
    add_sink,
    average,
    nothing_yet,
    scoring_arguments,
)
from quire.kernels.triton.attention.tiles import (
    find_blocks,
    head_width,
    load_kv,
    load_query,
    page_arguments,
    tile_tokens,
    values_of,
)
from quire.kernels.triton.sizes import next_power_of_2


def prefill_attention(
    q: Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    scoring: Scoring,
    out: Tensor,
    above: int = 1,
    below: int = 2**31 - 1,
) -> None:
    """Fill the rows of `out` of sequences with more new tokens than `above`, less than `below`."""
    sequences = len(batch.query_lens)
    group = q.shape[1] // pages.kv_heads
    exact = q.element_size() == 4  # float32 is multiplied without tensor cores, in registers
    rows = max(64, next_power_of_2(group))
    tiles = sum(batch.query_lens) // (rows // group) + sequences

    _attend[(tiles, pages.kv_heads)](
        q,
        out,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        *scoring_arguments(scoring, q),
        sequences,
        above,
        below,
        *q.stride(),
        *page_arguments(pages),
        *out.stride()[:2],
        batch.block_tables.stride(0),
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=pages.k_width,
        HEAD_WIDTH=head_width(pages.k),
        V_DIM=pages.v_width,
        V_WIDTH=head_width(pages.v),
        BLOCK_SIZE=pages.block_size,
        TILE=tile_tokens(pages, most=64),
        WINDOW=scoring.window or 0,
        CAPPED=scoring.softcap is not None,
        SINKS=scoring.sinks is not None,
        SCALED=pages.k_scales is not None,
        CONVERTS=has_conversion(q.device),
        num_warps=8 if exact else 4,
        num_stages=2 if exact else 3,
    )


@triton.jit(do_not_specialize=["sequences", "above", "below", "table_stride"])
def _attend(
    q,
    out,
    block_tables,
    query_starts,
    context_lens,
    scale,
    cap,
    sinks,
    sequences,
    above,
    below,
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
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    NUMBERS: tl.constexpr = 2 if SCALED else 1  # in an element of `pages`
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    # The last tokens see the most: they start first, so that no long program is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, first = find_tile(query_starts, sequences, tile, TOKENS)
    row = tl.load(query_starts + sequence).to(tl.int64)
    query_len = (tl.load(query_starts + sequence + 1) - row).to(tl.int32)
    context = tl.load(context_lens + sequence)
    if (query_len > above) & (query_len < below) & (first < query_len):
        lane = tl.arange(0, ROWS)
        token = first + lane // GROUP
        head = kv_head * GROUP + lane % GROUP
        row_live = (lane < TOKENS * GROUP) & (token < query_len)
        rows = q + (row + token) * q_row_stride + head * q_head_stride
        query = load_query(rows, row_live, q_dim_stride, HEAD_DIM, HEAD_WIDTH, SCALED)

        position = context - query_len + token
        oldest = context - query_len + first  # the position of the tile's first token
        end = tl.minimum(oldest + TOKENS, context)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(oldest - WINDOW + 1, 0)

        top, total, acc = nothing_yet(ROWS, V_WIDTH, SCALED)
        head_pages = pages + kv_head * head_stride
        head_values = values_of(pages, kv_stride, kv_head, BLOCK_SIZE, V_DIM // NUMBERS)
        head_scales = scales + kv_head * scale_head_stride
        table = block_tables + sequence.to(tl.int64) * table_stride
        if WINDOW == 0:
            begin = (oldest + 1) // TILE * TILE  # all rows see all keys before this one
            top, total, acc = _walk(
                query,
                head_pages,
                head_values,
                head_scales,
                table,
                0,
                begin,
                position,
                scale,
                cap,
                top,
                total,
                acc,
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
                TILE,
                WINDOW,
                CAPPED,
                SCALED,
                CONVERTS,
                False,
            )
        top, total, acc = _walk(
            query,
            head_pages,
            head_values,
            head_scales,
            table,
            begin,
            end,
            position,
            scale,
            cap,
            top,
            total,
            acc,
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
            TILE,
            WINDOW,
            CAPPED,
            SCALED,
            CONVERTS,
            True,
        )

        if SINKS:
            total = add_sink(total, top, tl.load(sinks + head, mask=row_live, other=0.0))
        value = average(total, acc, SCALED).to(out.dtype.element_ty)
        rows = out + (row + token) * out_row_stride + head * out_head_stride
        dims = tl.arange(0, V_WIDTH)
        live = row_live[:, None] & (dims < V_DIM)[None, :]
        tl.store(rows[:, None] + dims[None, :], value, mask=live)


@triton.jit
def _walk(
    query,
    head_pages,
    head_values,
    head_scales,
    table,
    begin,
    end,
    position,
    scale,
    cap,
    top,
    total,
    acc,
    block_stride,
    kv_stride,
    slot_stride,
    scale_block_stride,
    scale_kv_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    CONVERTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Absorb the keys from `begin` to `end`; not masked, all rows see all of them."""
    keys = begin + tl.arange(0, TILE)
    blocks = find_blocks(table, keys, end, BLOCK_SIZE)
    for _ in range(begin, end, TILE):
        seen = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= keys[None, :] > position[:, None] - WINDOW
        k, v, k_scale, v_scale = load_kv(
            head_pages,
            head_values,
            head_scales,
            blocks,
            keys,
            keys < end,
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
        keys += TILE
        blocks = find_blocks(table, keys, end, BLOCK_SIZE)
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
            MASKED,
            CAPPED,
            SCALED,
            CONVERTS,
        )
    return top, total, acc


@triton.jit
def find_tile(query_starts, sequences, tile, TOKENS: tl.constexpr):
    """The sequence that owns this tile, and the first of its tokens there."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low, (tile - tl.load(query_starts + low) // TOKENS - low) * TOKENS
