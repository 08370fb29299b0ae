"""Attention of a few rows over the latents of one sequence, tile by tile.

Scores are `[tokens, rows]` and sums `[rank, rows]`: latents stand on the left of both products, so
that tensor cores, which want 64 rows there, have them with 16 heads as well. A tile is read once;
it is K, with its rotated features, and without these it is V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.fp8 import GROUP
from quire.kernels.triton.attention.tiles import find_blocks

_GROUP: tl.constexpr = tl.constexpr(GROUP)


@triton.jit
def load_queries(
    rows,
    row_live,
    RANK: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
):
    """The rows that these pointers begin, as columns: those of the latent space, and rotated."""
    dims, turned = tl.arange(0, RANK_WIDTH), tl.arange(0, ROPE_WIDTH)
    mask = row_live[:, None] & (dims < RANK)[None, :]
    query = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)
    mask = row_live[:, None] & (turned < ROPE)[None, :]
    query_rope = tl.load(rows[:, None] + RANK + turned[None, :], mask=mask, other=0.0)
    return tl.trans(query), tl.trans(query_rope)


@triton.jit
def walk(
    query,
    query_rope,
    latents,
    rotated,
    scales,
    table,
    begin,
    end,
    last_seen,
    scale,
    block_stride,
    slot_stride,
    rope_block_stride,
    rope_slot_stride,
    scale_block_stride,
    scale_slot_stride,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """`top`, `total` and `acc` (see `attention/softmax.py`) over the tokens from `begin` to `end`,
    of which each row sees those up to its `last_seen`."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([RANK_WIDTH, ROWS], tl.float32)
    dims, turned = tl.arange(0, RANK_WIDTH), tl.arange(0, ROPE_WIDTH)
    positions = begin + tl.arange(0, TILE)
    blocks = find_blocks(table, positions, end, BLOCK_SIZE)
    for _ in range(begin, end, TILE):
        live = positions < end
        block, offset = blocks.to(tl.int64), positions % BLOCK_SIZE
        pointers = latents + (block * block_stride + offset * slot_stride)[:, None]
        mask = live[:, None] & (dims < RANK)[None, :]
        latent = tl.load(pointers + dims[None, :], mask=mask, other=0.0)
        if SCALED:
            pointers = scales + (block * scale_block_stride + offset * scale_slot_stride)[:, None]
            factor = tl.load(pointers + (dims // _GROUP)[None, :], mask=mask, other=0.0)
            latent = (latent.to(tl.float32) * factor).to(query.dtype)
        mask = live[:, None] & (turned < ROPE)[None, :]
        pointers = rotated + (block * rope_block_stride + offset * rope_slot_stride)[:, None]
        rope = tl.load(pointers + turned[None, :], mask=mask, other=0.0)
        seen = live[:, None] & (positions[:, None] <= last_seen[None, :])
        positions += TILE
        blocks = find_blocks(table, positions, end, BLOCK_SIZE)

        scores = tl.dot(latent, query, input_precision="ieee")
        scores = tl.dot(rope, query_rope, scores, input_precision="ieee")
        scores = tl.where(seen, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf less -inf would be NaN
        weights = tl.exp2(scores - base[None, :])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 0)
        weights = weights.to(latent.dtype)
        acc = tl.dot(tl.trans(latent), weights, acc * fade[None, :], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def average(total, acc):
    """`[rows, rank]`. A row that has seen nothing becomes zeros."""
    return tl.trans(acc / tl.where(total == 0.0, 1.0, total)[None, :])
