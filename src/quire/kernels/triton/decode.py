"""Attention of sequences with one new token: all programs have the same work, whoever's it is.

One program takes its share of all tokens (`parts.py`), sequence by sequence, for one KV head with
all query heads that share it: K and V are read once. Where a sequence falls into several parts, the
program that is done last puts them together, each weighted by its share of the softmax. Lengths are
read on the device, so a launch can be captured in a graph and replayed as sequences grow.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.parts import FIELDS, Parts, deal
from quire.kernels.triton.tiles import (
    LOG2_E,
    absorb,
    find_blocks,
    head_width,
    load_tile,
    tile_tokens,
)

_TILE = 64
_WARPS = 4
_STAGES = 3
_PROGRAMS_PER_PROCESSOR = 2


def deal_decodes(batch: AttentionBatch, q: Tensor, pages: Tensor, window: int | None) -> Parts:
    """What `decode_attention` works by; the same for all layers with this window."""
    _, groups = _rows(q, pages)
    programs = max(1, _processors(q.device) * _PROGRAMS_PER_PROCESSOR // groups)
    return deal(batch, q, groups, programs, tile_tokens(pages, most=_TILE), window)


def decode_attention(
    q: Tensor, pages: Tensor, batch: AttentionBatch, parts: Parts, scale: float, out: Tensor
) -> None:
    """Fill the rows of `out` that belong to sequences with one row; `pages` is one layer."""
    heads, head_dim = q.shape[1:]
    group = heads // pages.shape[2]
    rows, groups = _rows(q, pages)
    width = head_width(pages)
    members = min(rows, triton.next_power_of_2(group))
    _attend[(groups, parts.programs)](
        q,
        pages,
        out,
        parts.starts,
        parts.list,
        parts.arrivals,
        parts.values,
        parts.shares,
        batch.block_tables,
        scale * LOG2_E,
        *q.stride(),
        *pages.stride()[:4],
        *out.stride()[:2],
        batch.block_tables.stride(0),
        HEADS=heads,
        GROUP=group,
        ROWS=rows,
        MEMBERS=members,
        AT_ONCE=max(1, 8192 // (members * width)),
        HEAD_DIM=head_dim,
        HEAD_WIDTH=width,
        BLOCK_SIZE=pages.shape[3],
        TILE=tile_tokens(pages, most=_TILE),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )


def _rows(q: Tensor, pages: Tensor) -> tuple[int, int]:
    """Query heads that a program takes, padded to what tensor cores want; groups of such heads."""
    kv_heads = pages.shape[2]
    group = q.shape[1] // kv_heads
    rows = min(64, max(16, triton.next_power_of_2(group)))
    return rows, kv_heads * triton.cdiv(group, rows)


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
    starts,
    parts_list,
    arrivals,
    values,
    shares,
    block_tables,
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
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    group = tl.program_id(0)
    row_tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = group // row_tiles
    base = (group % row_tiles) * ROWS
    member = base + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_WIDTH)
    row_live = member < GROUP
    live = row_live[:, None] & (dims < HEAD_DIM)[None, :]
    head_pages = pages + kv_head * head_stride

    own = starts + tl.program_id(1)
    for item in range(tl.load(own), tl.load(own + 1)):
        field = parts_list + item * FIELDS
        sequence = tl.load(field).to(tl.int64)
        row = tl.load(field + 1).to(tl.int64)
        first = tl.load(field + 2)
        end = tl.load(field + 3)
        part = tl.load(field + 4)
        parts = tl.load(field + 5)

        table = block_tables + sequence * table_stride
        positions = first + tl.arange(0, TILE)
        blocks = find_blocks(table, positions, end, BLOCK_SIZE)
        offsets = head[:, None] * q_head_stride + dims[None, :] * q_dim_stride
        query = tl.load(q + row * q_row_stride + offsets, mask=live, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_WIDTH], tl.float32)
        for _ in range(first, end, TILE):
            seen = positions < end
            k, v = load_tile(
                head_pages,
                blocks,
                positions,
                seen,
                block_stride,
                kv_stride,
                slot_stride,
                BLOCK_SIZE,
                HEAD_DIM,
                HEAD_WIDTH,
            )
            positions += TILE
            blocks = find_blocks(table, positions, end, BLOCK_SIZE)
            top, total, acc = absorb(query, k, v, seen[None, :], scale, top, total, acc, True)

        # Nothing seen: a padded row, which becomes zeros.
        total = tl.where(total == 0.0, 1.0, total)
        value = acc / total[:, None]
        target = out + row * out_row_stride
        if parts == 1:
            to = target + head[:, None] * out_head_stride + dims[None, :]
            tl.store(to, value.to(out.dtype.element_ty), mask=live)
        else:
            place = item * HEADS + head
            tl.store(shares + place, top + tl.log2(total), mask=row_live)
            tl.store(values + place[:, None] * HEAD_DIM + dims[None, :], value, mask=live)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrivals + sequence * tl.num_programs(0) + group
            if tl.atomic_add(counter, 1) == parts - 1:
                tl.store(counter, 0)
                _put_together(
                    values,
                    shares,
                    target,
                    item - part,
                    parts,
                    kv_head * GROUP + base,
                    GROUP - base,
                    out_head_stride,
                    HEADS,
                    MEMBERS,
                    AT_ONCE,
                    HEAD_DIM,
                    HEAD_WIDTH,
                )


@triton.jit
def _put_together(
    values,
    shares,
    target,
    first,
    parts,
    first_head,
    num_heads,
    out_head_stride,
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
):
    """Store the attention of some heads, from all parts of a sequence; none of them is empty."""
    member = tl.arange(0, MEMBERS)
    head = first_head + member
    head_live = member < num_heads
    dims = tl.arange(0, HEAD_WIDTH)
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, HEAD_WIDTH], tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        place = (first + part)[:, None] * HEADS + head[None, :]
        there = (part < parts)[:, None] & head_live[None, :]
        # Others have written these: what the processor's own cache holds may be older.
        share = tl.load(shares + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            values + place[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=there[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(share, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # heads that only fill the tile
        weight = tl.exp2(share - base[None, :])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade[:, None] + tl.sum(value * weight[:, :, None], 0)
        top = new_top
    value = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = target + head[:, None] * out_head_stride + dims[None, :]
    live = head_live[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(to, value.to(target.dtype.element_ty), mask=live)
