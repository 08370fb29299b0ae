"""Copies of a warpgroup on a Hopper GPU: q, then pairs of tiles of latents (`hopper_pairs.py`).

A tile's halves are copied in the order in which the warpgroups that compute are done with what was
in their places: even left, even right, odd right, odd left. Which blocks a pair is in is read one
pair ahead, so that no copy waits for the block table.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from quire.kernels.triton.latent.hopper_tiles import copy_async


@gluon.jit
def fetch_pairs(
    q, latents, table, qs, q_turned, ks, turned, has, free,
    row, lane, length, first, end, pairs, q_row_stride, q_head_stride, block_stride,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = ks.shape[2]
    RANK: gl.constexpr = 2 * HALF
    WIDTH: gl.constexpr = RANK + turned.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))[None, :]
    few = gl.arange(0, turned.shape[2], layout=gl.SliceLayout(0, layout))[None, :]
    tokens = gl.arange(0, 64, layout=rows)
    even_blocks = _blocks(table, first + tokens, end, BLOCK_SIZE)
    odd_blocks = _blocks(table, first + 64 + tokens, end, BLOCK_SIZE)
    # Rows past the sequence's last are the last again; their results are not stored.
    lanes = gl.minimum(lane + tokens, length * HEADS - 1)
    heads = q + (row + lanes // HEADS) * q_row_stride + lanes % HEADS * q_head_stride
    if pairs > 0:  # else nothing would wait for these copies
        copy_async(qs.index(0), heads[:, None] + dims)
        copy_async(qs.index(1), heads[:, None] + HALF + dims)
        copy_async(q_turned.index(0), heads[:, None] + RANK + few)
    for pair in range(pairs):
        position = first + pair * 128
        even = _pointers(
            latents, even_blocks, position + tokens, end, block_stride, WIDTH, BLOCK_SIZE
        )
        odd = _pointers(
            latents, odd_blocks, position + 64 + tokens, end, block_stride, WIDTH, BLOCK_SIZE
        )
        even_blocks = _blocks(table, position + 128 + tokens, end, BLOCK_SIZE)
        odd_blocks = _blocks(table, position + 192 + tokens, end, BLOCK_SIZE)
        phase = (pair & 1) ^ 1
        mbarrier.wait(free.index(0), phase)
        copy_async(ks.index(0), even[:, None] + dims)
        async_copy.mbarrier_arrive(has.index(0), increment_count=False)
        mbarrier.wait(free.index(1), phase)
        copy_async(ks.index(1), even[:, None] + HALF + dims)
        copy_async(turned.index(0), even[:, None] + RANK + few)
        async_copy.mbarrier_arrive(has.index(1), increment_count=False)
        mbarrier.wait(free.index(3), phase)
        copy_async(ks.index(3), odd[:, None] + HALF + dims)
        async_copy.mbarrier_arrive(has.index(3), increment_count=False)
        mbarrier.wait(free.index(2), phase)
        copy_async(ks.index(2), odd[:, None] + dims)
        copy_async(turned.index(1), odd[:, None] + RANK + few)
        async_copy.mbarrier_arrive(has.index(2), increment_count=False)


@gluon.jit
def _blocks(table, tokens, end, BLOCK_SIZE: gl.constexpr):
    """Past the end it is the last token's again: what is in memory is a number, its weight 0."""
    return gl.load(table + gl.minimum(tokens, end - 1) // BLOCK_SIZE)


@gluon.jit
def _pointers(
    latents, blocks, tokens, end, block_stride, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    offsets = gl.minimum(tokens, end - 1) % BLOCK_SIZE * WIDTH
    return latents + blocks.to(gl.int64) * block_stride + offsets
