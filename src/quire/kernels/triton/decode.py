"""Attention of sequences with one new token: long contexts are cut, so that few can fill a GPU.

One program takes one part of one sequence's tokens (`parts.py`) for one KV head, with all query
heads that share it: K and V are read once. A second kernel puts the parts of a sequence together,
each weighted by its share of the softmax. Lengths are read on the device, so the launches can be
captured in a graph and replayed as sequences grow.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import is_fp8
from quire.kernels.triton.combine import put_together
from quire.kernels.triton.parts import FIELDS, Parts, cut
from quire.kernels.triton.softmax import LOG2_E, absorb, average, nothing_yet
from quire.kernels.triton.tiles import (
    find_blocks,
    head_width,
    load_kv,
    load_query,
    scale_arguments,
    tile_tokens,
)
from quire.kernels.triton.words import as_loaded, has_conversion

# Tokens of a tile, warps of a program, tiles under way: measured on an H200.
_SHAPE = (64, 4, 3)
_FP8_SHAPE = (64, 2, 3)
_PROGRAMS_PER_PROCESSOR = 2


def cut_decodes(batch: AttentionBatch, q: Tensor, pages: Tensor, window: int | None) -> Parts:
    """What `decode_attention` works by; the same for all layers with this window."""
    _, groups = _rows(q, pages)
    programs = _processors(q.device) * _PROGRAMS_PER_PROCESSOR
    return cut(batch, q, groups, programs, _shape(pages)[0], window)


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
    rows, groups = _rows(q, pages)
    width = head_width(pages)
    early = _can_start_early(q.device)
    tile, warps, stages = _shape(pages)
    loaded = as_loaded(pages)
    _attend[(groups, parts.count)](
        q,
        loaded,
        out,
        parts.list,
        parts.values,
        parts.shares,
        batch.block_tables,
        scale * LOG2_E,
        *q.stride(),
        *loaded.stride()[:4],
        *scale_arguments(pages, scales),
        *out.stride()[:2],
        batch.block_tables.stride(0),
        HEADS=heads,
        GROUP=heads // pages.shape[2],
        ROWS=rows,
        HEAD_DIM=head_dim,
        HEAD_WIDTH=width,
        BLOCK_SIZE=pages.shape[3],
        TILE=tile,
        SCALED=scales is not None,
        CONVERTS=has_conversion(q.device),
        EARLY=early,
        num_warps=warps,
        num_stages=stages,
    )
    put_together(parts, batch, out, early)


def _shape(pages: Tensor) -> tuple[int, int, int]:
    tile, warps, stages = _FP8_SHAPE if is_fp8(pages) else _SHAPE
    return tile_tokens(pages, most=tile), warps, stages


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


@memoise
def _can_start_early(device: torch.device) -> bool:
    """Whether the second kernel can be got ready while the first still runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    q,
    pages,
    out,
    parts_list,
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
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    CONVERTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(1)
    field = parts_list + item * FIELDS
    # All at once, before the first is looked at: waiting for one after the other takes longer.
    sequence = tl.load(field).to(tl.int64)
    row = tl.load(field + 1).to(tl.int64)
    first = tl.load(field + 2)
    end = tl.load(field + 3)
    parts = tl.load(field + 4)
    if sequence < 0:
        return

    row_tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // row_tiles
    member = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_WIDTH)
    row_live = member < GROUP
    live = row_live[:, None] & (dims < HEAD_DIM)[None, :]

    head_pages = pages + kv_head * head_stride
    head_scales = scales + kv_head * scale_head_stride
    table = block_tables + sequence * table_stride
    positions = first + tl.arange(0, TILE)
    blocks = find_blocks(table, positions, end, BLOCK_SIZE)
    rows = q + row * q_row_stride + head * q_head_stride
    query = load_query(rows, row_live, q_dim_stride, HEAD_DIM, HEAD_WIDTH, SCALED)
    top, total, acc = nothing_yet(ROWS, HEAD_WIDTH, SCALED)
    for _ in range(first, end, TILE):
        seen = positions < end
        k, v, k_scale, v_scale = load_kv(
            head_pages,
            head_scales,
            blocks,
            positions,
            seen,
            block_stride,
            kv_stride,
            slot_stride,
            scale_block_stride,
            scale_kv_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            HEAD_WIDTH,
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
            seen[None, :],
            scale,
            top,
            total,
            acc,
            True,
            SCALED,
            CONVERTS,
        )

    value = average(total, acc, SCALED)
    if parts == 1:
        to = out + row * out_row_stride + head[:, None] * out_head_stride + dims[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=live)
    else:
        total = tl.where(total == 0.0, 1.0, total)
        place = item * HEADS + head
        tl.store(shares + place, top + tl.log2(total), mask=row_live)
        tl.store(values + place[:, None] * HEAD_DIM + dims[None, :], value, mask=live)
