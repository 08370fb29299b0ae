"""Attention of long prompts over K and V that were computed from latents, laid end to end.

One program takes some consecutive tokens with one head. K has two parts: features of the head, and
rotated ones that all heads share and none keeps a copy of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.attention.prefill import find_tile
from quire.kernels.triton.attention.softmax import LOG2_E
from quire.kernels.triton.sizes import next_power_of_2


class Shape(NamedTuple):
    """Of a program: its rows, keys of a tile, warps, stages of its loop."""

    rows: int
    tile: int
    warps: int
    stages: int


SHAPE = Shape(128, 64, 8, 3)
EXACT = Shape(32, 32, 4, 2)  # float32, without tensor cores


def expanded_attention(
    q: Tensor, kv: Tensor, k_rope: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    tokens, heads, _ = q.shape
    rope = k_rope.shape[1]
    nope = q.shape[2] - rope
    values = kv.shape[2] - nope
    shape = EXACT if q.element_size() == 4 else SHAPE
    sequences = len(batch.query_lens)
    starts = batch.context_lens.cumsum(0) - batch.context_lens
    out = torch.empty((tokens, heads, values), dtype=q.dtype, device=q.device)
    _attend[(tokens // shape.rows + sequences, heads)](
        q,
        kv,
        k_rope,
        out,
        batch.query_starts,
        batch.context_lens,
        starts,
        scale * LOG2_E,
        sequences,
        *q.stride()[:2],
        *kv.stride()[:2],
        k_rope.stride(0),
        *out.stride()[:2],
        NOPE=nope,
        NOPE_WIDTH=max(16, next_power_of_2(nope)),
        ROPE=rope,
        ROPE_WIDTH=max(16, next_power_of_2(rope)),
        VALUES=values,
        VALUES_WIDTH=max(16, next_power_of_2(values)),
        ROWS=shape.rows,
        TILE=shape.tile,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


@triton.jit(do_not_specialize=["sequences"])
def _attend(
    q,
    kv,
    k_rope,
    out,
    query_starts,
    context_lens,
    starts,
    scale,
    sequences,
    q_stride,
    q_head_stride,
    kv_stride,
    kv_head_stride,
    rope_stride,
    out_stride,
    out_head_stride,
    NOPE: tl.constexpr,
    NOPE_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1)
    # The last tokens see the most: they start first, so that no long program is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, first = find_tile(query_starts, sequences, tile, ROWS)
    row = tl.load(query_starts + sequence).to(tl.int64)
    length = (tl.load(query_starts + sequence + 1) - row).to(tl.int32)
    context = tl.load(context_lens + sequence)
    start = tl.load(starts + sequence).to(tl.int64)
    if first < length:
        token = first + tl.arange(0, ROWS)
        row_live = token < length
        dims, turned = tl.arange(0, NOPE_WIDTH), tl.arange(0, ROPE_WIDTH)
        rows = q + (row + token) * q_stride + head * q_head_stride
        mask = row_live[:, None] & (dims < NOPE)[None, :]
        query = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)
        mask = row_live[:, None] & (turned < ROPE)[None, :]
        query_rope = tl.load(rows[:, None] + NOPE + turned[None, :], mask=mask, other=0.0)
        position = context - length + token
        oldest = context - length + first
        end = tl.minimum(oldest + ROWS, context)
        whole = (oldest + 1) // TILE * TILE  # all rows see all keys before this one

        head_kv = kv + start * kv_stride + head * kv_head_stride
        head_rope = k_rope + start * rope_stride
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUES_WIDTH], tl.float32)
        top, total, acc = _walk(
            query, query_rope, head_kv, head_rope, 0, whole, end, position, scale,
            top, total, acc, kv_stride, rope_stride,
            NOPE, NOPE_WIDTH, ROPE, ROPE_WIDTH, VALUES, VALUES_WIDTH, TILE, False,
        )  # fmt: skip
        top, total, acc = _walk(
            query, query_rope, head_kv, head_rope, whole, end, end, position, scale,
            top, total, acc, kv_stride, rope_stride,
            NOPE, NOPE_WIDTH, ROPE, ROPE_WIDTH, VALUES, VALUES_WIDTH, TILE, True,
        )  # fmt: skip
        value = (acc / total[:, None]).to(out.dtype.element_ty)
        dims = tl.arange(0, VALUES_WIDTH)
        rows = out + (row + token) * out_stride + head * out_head_stride
        live = row_live[:, None] & (dims < VALUES)[None, :]
        tl.store(rows[:, None] + dims[None, :], value, mask=live)


@triton.jit
def _walk(
    query,
    query_rope,
    kv,
    k_rope,
    begin,
    stop,
    end,
    position,
    scale,
    top,
    total,
    acc,
    kv_stride,
    rope_stride,
    NOPE: tl.constexpr,
    NOPE_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax for each tile; not masked, all rows see all keys of it."""
    dims, turned = tl.arange(0, NOPE_WIDTH), tl.arange(0, ROPE_WIDTH)
    places = tl.arange(0, VALUES_WIDTH)
    for first in range(begin, stop, TILE):
        keys = first + tl.arange(0, TILE)
        live = keys < end
        rows = kv + keys.to(tl.int64)[:, None] * kv_stride
        mask = live[:, None] & (dims < NOPE)[None, :]
        k = tl.load(rows + dims[None, :], mask=mask, other=0.0)
        mask = live[:, None] & (turned < ROPE)[None, :]
        rotated = k_rope + keys.to(tl.int64)[:, None] * rope_stride + turned[None, :]
        k_turned = tl.load(rotated, mask=mask, other=0.0)
        mask = live[:, None] & (places < VALUES)[None, :]
        v = tl.load(rows + NOPE + places[None, :], mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        scores = tl.dot(query_rope, tl.trans(k_turned), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc
