"""Attention of sequences with one new token: each context is split, so that few can fill a GPU.

One program takes one part of one sequence's tokens for one KV head, with all query heads that share
it: K and V are read once. A second kernel combines the parts, each weighted by its share of the
softmax. Lengths are read on the device: the grid depends on the number of sequences and the width
of the block table alone, so the launch can be captured in a graph and replayed as sequences grow.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.tiles import LOG2_E, absorb, head_width, load_tile, tile_tokens

_MOST_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 4


def decode_attention(
    q: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Fill the rows of `out` that belong to sequences with one row; `pages` is one layer."""
    sequences, heads, head_dim = len(batch.query_lens), q.shape[1], q.shape[2]
    kv_heads, block_size = pages.shape[2], pages.shape[3]
    group = heads // kv_heads
    rows = min(64, max(16, triton.next_power_of_2(group)))
    groups = kv_heads * triton.cdiv(group, rows)

    tile = tile_tokens(pages, most=64)
    longest = batch.block_tables.shape[1] * block_size
    if window is not None:
        longest = min(longest, window)
    splits = _splits(sequences * groups, triton.cdiv(longest, tile), _processors(q.device))
    shape = (sequences, heads, splits, head_dim) if splits > 1 else (0,)
    parts = torch.empty(shape, dtype=torch.float32, device=q.device)
    shares = torch.empty(shape[:3], dtype=torch.float32, device=q.device)

    _attend[(groups, splits, sequences)](
        q,
        pages,
        out,
        parts,
        shares,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        scale * LOG2_E,
        *q.stride(),
        *pages.stride()[:4],
        *out.stride()[:2],
        batch.block_tables.stride(0),
        HEADS=heads,
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        HEAD_WIDTH=head_width(pages),
        BLOCK_SIZE=block_size,
        TILE=tile,
        SPLITS=splits,
        WINDOW=window or 0,
    )
    if splits > 1:
        _combine[(heads, sequences)](
            parts,
            shares,
            out,
            batch.query_starts,
            *out.stride()[:2],
            HEADS=heads,
            HEAD_DIM=head_dim,
            HEAD_WIDTH=head_width(pages),
            SPLITS=splits,
        )


def _splits(programs: int, tiles: int, processors: int) -> int:
    """A power of two: enough parts to give every processor some, none shorter than a tile."""
    wanted = triton.cdiv(processors * _PROGRAMS_PER_PROCESSOR, programs)
    return int(triton.next_power_of_2(max(1, min(wanted, tiles, _MOST_SPLITS))))


@memoise
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # the interpreter: enough for several parts
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    q,
    pages,
    out,
    parts,
    shares,
    block_tables,
    query_starts,
    context_lens,
    scale,
    q_row_stride,
    q_head_stride,
    q_dim_stride,
    block_stride,
    kv_stride,
    head_stride,
    slot_stride,
    out_row_stride,
    out_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    row_tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // row_tiles
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)

    member = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_WIDTH)
    row_live = member < GROUP
    live = row_live[:, None] & (dims < HEAD_DIM)[None, :]

    row = tl.load(query_starts + sequence).to(tl.int64)
    if tl.load(query_starts + sequence + 1) - row == 1:
        context = tl.load(context_lens + sequence)
        oldest = 0
        if WINDOW > 0:
            oldest = tl.maximum(context - WINDOW, 0)
        length = tl.cdiv(tl.cdiv(context - oldest, TILE), SPLITS) * TILE
        first = oldest + split * length
        end = tl.minimum(first + length, context)

        offsets = head[:, None] * q_head_stride + dims[None, :] * q_dim_stride
        query = tl.load(q + row * q_row_stride + offsets, mask=live, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_WIDTH], tl.float32)
        head_pages = pages + kv_head * head_stride
        table = block_tables + sequence * table_stride
        for start in range(first, end, TILE):
            positions = start + tl.arange(0, TILE)
            seen = positions < end
            k, v = load_tile(
                head_pages,
                table,
                positions,
                seen,
                block_stride,
                kv_stride,
                slot_stride,
                BLOCK_SIZE,
                HEAD_DIM,
                HEAD_WIDTH,
            )
            top, total, acc = absorb(query, k, v, seen[None, :], scale, top, total, acc)

        # Nothing seen: a padded row, which becomes zeros, or an empty part, whose share is -inf.
        total = tl.where(total == 0.0, 1.0, total)
        value = acc / total[:, None]
        if SPLITS == 1:
            target = out + row * out_row_stride + head[:, None] * out_head_stride + dims[None, :]
            tl.store(target, value.to(out.dtype.element_ty), mask=live)
        else:
            part = (sequence * HEADS + head) * SPLITS + split
            tl.store(shares + part, top + tl.log2(total), mask=row_live)
            tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], value, mask=live)


@triton.jit
def _combine(
    parts,
    shares,
    out,
    query_starts,
    out_row_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    row = tl.load(query_starts + sequence).to(tl.int64)
    if tl.load(query_starts + sequence + 1) - row == 1:
        part = (sequence * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
        share = tl.load(shares + part)
        top = tl.max(share, 0)
        # A padded row has no context: all its parts are empty.
        weight = tl.exp2(share - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weight, 0)
        dims = tl.arange(0, HEAD_WIDTH)
        dim_live = dims < HEAD_DIM
        pointers = parts + part[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(pointers, mask=dim_live[None, :], other=0.0)
        value = tl.sum(values * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        target = out + row * out_row_stride + head * out_head_stride + dims
        tl.store(target, value.to(out.dtype.element_ty), mask=dim_live)
