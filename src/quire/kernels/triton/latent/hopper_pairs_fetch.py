"""Copies of a warpgroup on a Hopper GPU: q, then pairs of tiles of latents (`hopper_pairs.py`).

Quarters of a tile are copied in the order in which the warpgroups that compute are done with what
was in their places: the even tile's from the left to the right, then the odd tile's right half and
its left one. Which blocks a pair is in is read one pair ahead, so that no copy waits for the block
table.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from quire.kernels.triton.gluon_names import copy_async
from quire.kernels.triton.latent.hopper_tiles import (
    LAYOUT,
    ROWS,
    blocks_of,
    rows_of,
    wait_then_trigger,
)


@gluon.jit
def fetch_pairs(
    q, latents, table, qs, q_turned, ks, turned, has, free,
    row, lane, length, first, end, pairs, q_row_stride, q_head_stride, block_stride,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    SIZE: gl.constexpr = ks.shape[2]  # of a quarter
    RANK: gl.constexpr = 4 * SIZE
    WIDTH: gl.constexpr = RANK + turned.shape[2]
    dims = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    few = gl.arange(0, turned.shape[2], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    last = gl.maximum(end - 1, 0)
    tokens = gl.arange(0, 64, layout=ROWS)
    even_blocks = blocks_of(table, first + tokens, last, BLOCK_SIZE)
    odd_blocks = blocks_of(table, first + 64 + tokens, last, BLOCK_SIZE)
    wait_then_trigger(PDL)  # for q, and the latents of new tokens
    # Rows past the sequence's last are the last again; their results are not stored.
    lanes = gl.minimum(lane + tokens, length * HEADS - 1)
    heads = (q + (row + lanes // HEADS) * q_row_stride + lanes % HEADS * q_head_stride)[:, None]
    if pairs > 0:  # else nothing would wait for these copies
        copy_async(qs.index(0), heads + dims)
        copy_async(qs.index(1), heads + SIZE + dims)
    for pair in range(pairs):
        position = first + pair * 128
        phase = (pair & 1) ^ 1
        even = rows_of(
            latents, even_blocks, position + tokens, last, block_stride, WIDTH, BLOCK_SIZE
        )[:, None]
        even_blocks = blocks_of(table, position + 128 + tokens, last, BLOCK_SIZE)
        next_odd_blocks = blocks_of(table, position + 192 + tokens, last, BLOCK_SIZE)
        _copy_quarter(ks, even + dims, has, free, phase, 0, 0)
        _copy_quarter(ks, even + dims, has, free, phase, 0, 1)
        if pair == 0:  # the first scores need but the left half of q
            copy_async(qs.index(2), heads + 2 * SIZE + dims)
            copy_async(qs.index(3), heads + 3 * SIZE + dims)
            copy_async(q_turned.index(0), heads + RANK + few)
        _copy_quarter(ks, even + dims, has, free, phase, 0, 2)
        # The weights that lie where rotated features go are needed as long as the last quarter.
        mbarrier.wait(free[3], phase)
        copy_async(turned.index(0), even + RANK + few)
        _copy_quarter(ks, even + dims, has, free, phase, 0, 3)

        odd = rows_of(
            latents, odd_blocks, position + 64 + tokens, last, block_stride, WIDTH, BLOCK_SIZE
        )[:, None]
        odd_blocks = next_odd_blocks
        _copy_quarter(ks, odd + dims, has, free, phase, 1, 2)
        _copy_quarter(ks, odd + dims, has, free, phase, 1, 3)
        _copy_quarter(ks, odd + dims, has, free, phase, 1, 0)
        mbarrier.wait(free[5], phase)
        copy_async(turned.index(1), odd + RANK + few)
        _copy_quarter(ks, odd + dims, has, free, phase, 1, 1)


@gluon.jit
def _copy_quarter(ks, tile, has, free, phase, TILE: gl.constexpr, QUARTER: gl.constexpr):
    """When its place is free."""
    mbarrier.wait(free[4 * TILE + QUARTER], phase)
    copy_async(ks.index(4 * TILE + QUARTER), tile + QUARTER * ks.shape[2])
    async_copy.mbarrier_arrive(has[4 * TILE + QUARTER], increment_count=False)
