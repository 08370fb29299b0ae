"""Attention of sequences with one new token: long contexts are cut, so that few can fill a GPU.

One program takes one part of one sequence's tokens (`parts.py`) for one KV head, with all query
heads that share it: K and V are read once. Its warps share no tile: each has some of a tile's keys,
as one of a batch of small products, and a running softmax of its own; so they wait for each other
only at the end. Where a sequence has several parts, the program that is done last puts them
together, each weighted by its share of the softmax.

Lengths are read on the device, so a launch can be captured in a graph and replayed as sequences
grow.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.parts import FIELDS, Parts, cut
from quire.kernels.triton.tiles import LOG2_E, find_blocks, head_width, scale_arguments

_KEYS = 16  # of a tile, for each warp: the least that tensor cores take
_STAGES = 3
_BUFFERS = 98304  # bytes for the tiles under way, so that two programs fit on a processor
_PROGRAMS_PER_PROCESSOR = 2
_GATHERED = 8192  # numbers that a program loads at once to put parts together


def cut_decodes(batch: AttentionBatch, q: Tensor, pages: Tensor, window: int | None) -> Parts:
    """What `decode_attention` works by; the same for all layers with this window."""
    _, groups = _rows(q, pages)
    programs = _processors(q.device) * _PROGRAMS_PER_PROCESSOR
    return cut(batch, q, groups, programs, _warps(q) * _KEYS, window)


def decode_attention(
    q: Tensor,
    pages: Tensor,
    scales: Tensor | None,
    batch: AttentionBatch,
    parts: Parts,
    scale: float,
    out: Tensor,
) -> None:
    """Fill the rows of `out` that belong to sequences with one row.

    `pages` is one layer, and `scales` what fp8 is scaled by.
    """
    heads, head_dim = q.shape[1:]
    group = heads // pages.shape[2]
    rows, groups = _rows(q, pages)
    width = head_width(pages)
    warps = _warps(q)
    tile_bytes = 2 * warps * _KEYS * width * pages.element_size()
    members = min(rows, triton.next_power_of_2(group))
    _attend[(groups, parts.count)](
        q,
        pages,
        out,
        parts.list,
        parts.arrivals,
        parts.values,
        parts.shares,
        batch.block_tables,
        scale * LOG2_E,
        *q.stride(),
        *pages.stride()[:4],
        *scale_arguments(pages, scales),
        *out.stride()[:2],
        batch.block_tables.stride(0),
        HEADS=heads,
        GROUP=group,
        ROWS=rows,
        MEMBERS=members,
        AT_ONCE=max(1, _GATHERED // (members * width)),
        HEAD_DIM=head_dim,
        HEAD_WIDTH=width,
        BLOCK_SIZE=pages.shape[3],
        WARPS=warps,
        KEYS=_KEYS,
        SCALED=scales is not None,
        num_warps=warps,
        num_stages=max(2, min(_STAGES, _BUFFERS // tile_bytes)),
    )


def _rows(q: Tensor, pages: Tensor) -> tuple[int, int]:
    """Query heads that a program takes, padded to what tensor cores want; groups of such heads."""
    kv_heads = pages.shape[2]
    group = q.shape[1] // kv_heads
    rows = min(64, max(16, triton.next_power_of_2(group)))
    return rows, kv_heads * triton.cdiv(group, rows)


def _warps(q: Tensor) -> int:
    return 2 if q.element_size() == 4 else 4


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
    scales,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
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
    WARPS: tl.constexpr,
    KEYS: tl.constexpr,
    SCALED: tl.constexpr,
):
    item = tl.program_id(1)
    field = parts_list + item * FIELDS
    sequence = tl.load(field).to(tl.int64)
    if sequence < 0:
        return
    row = tl.load(field + 1).to(tl.int64)
    first = tl.load(field + 2)
    end = tl.load(field + 3)
    part = tl.load(field + 4)
    parts = tl.load(field + 5)

    group = tl.program_id(0)
    row_tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = group // row_tiles
    base = (group % row_tiles) * ROWS
    member = base + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_WIDTH)
    row_live = member < GROUP
    live = row_live[:, None] & (dims < HEAD_DIM)[None, :]

    offsets = head[:, None] * q_head_stride + dims[None, :] * q_dim_stride
    query = tl.load(q + row * q_row_stride + offsets, mask=live, other=0.0)
    top, total, acc = _walk(
        tl.broadcast_to(query[None, :, :], (WARPS, ROWS, HEAD_WIDTH)),
        pages + kv_head * head_stride,
        scales + kv_head * scale_head_stride,
        block_tables + sequence * table_stride,
        first,
        end,
        scale,
        block_stride,
        kv_stride,
        slot_stride,
        scale_block_stride,
        scale_kv_stride,
        ROWS,
        HEAD_DIM,
        HEAD_WIDTH,
        BLOCK_SIZE,
        WARPS,
        KEYS,
        SCALED,
    )
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
def _walk(
    query,
    head_pages,
    head_scales,
    table,
    first,
    end,
    scale,
    block_stride,
    kv_stride,
    slot_stride,
    scale_block_stride,
    scale_kv_stride,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    KEYS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The running softmax (see `tiles.py`) over the tokens from `first` to `end`.

    A tile is `[warps, keys, head_width]`, and everything else has the warps in front as well. The
    scales of fp8 go to scores and weights, of which there are fewer than of keys' numbers.
    """
    top = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([WARPS, ROWS], tl.float32)
    acc = tl.zeros([WARPS, ROWS, HEAD_WIDTH], tl.float32)
    dims = tl.arange(0, HEAD_WIDTH)
    positions = first + tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    blocks = find_blocks(table, positions, end, BLOCK_SIZE)
    for _ in range(first, end, WARPS * KEYS):
        seen = positions < end
        starts = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride
        pointers = head_pages + starts[:, :, None] + dims[None, None, :]
        mask = seen[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        k = tl.load(pointers, mask=mask, other=0.0)
        v = tl.load(pointers + kv_stride, mask=mask, other=0.0)
        if SCALED:
            at = head_scales + blocks.to(tl.int64) * scale_block_stride + positions % BLOCK_SIZE
            k_scale = tl.load(at, mask=seen, other=0.0)
            v_scale = tl.load(at + scale_kv_stride, mask=seen, other=0.0)
        positions += WARPS * KEYS
        blocks = find_blocks(table, positions, end, BLOCK_SIZE)

        if SCALED:
            k, v = k.to(tl.float32).to(query.dtype), v.to(tl.float32).to(query.dtype)
        scores = tl.dot(query, tl.permute(k, (0, 2, 1)), input_precision="ieee")
        if SCALED:
            scores *= k_scale[:, None, :]
        scores = tl.where(seen[:, None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 2) * scale)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: -inf - -inf is NaN
        weights = tl.exp2(scores * scale - base[:, :, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 2)
        if SCALED:
            weights *= v_scale[:, None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, :, None], input_precision="ieee")
        top = new_top

    # The warps' own sums, put together.
    best = tl.max(top, 0)
    fade = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best)[None, :])
    return best, tl.sum(total * fade, 0), tl.sum(acc * fade[:, :, None], 0)


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
