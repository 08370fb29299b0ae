"""What both of Hopper's kernels for latents load: rows of q, and tiles of 64 tokens' latents.

Four warps copy tiles from their pages to shared memory, ahead of those that compute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.gluon_names import copy_async

FETCHING_WARPS = 4
LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [FETCHING_WARPS, 1], [1, 0]))
ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, LAYOUT.value))


@gluon.jit
def wait_then_trigger(PDL: gl.constexpr):
    """As in `pdl.py`, whose functions are Triton's."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit
def fetch_tiles(
    latents,
    table,
    ks,
    turned,
    has,
    free,
    first,
    end,
    tiles,
    block_stride,
    BLOCK_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of 64 tokens from `first` to `end`, each to the next place in `ks` and `turned`.

    Which blocks a tile is in is read one tile ahead, so that no copy waits for the block table."""
    STAGES: gl.constexpr = ks.shape[0]
    RANK: gl.constexpr = ks.shape[2]
    WIDTH: gl.constexpr = RANK + turned.shape[2]
    dims = gl.arange(0, RANK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    few = gl.arange(0, turned.shape[2], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    last = gl.maximum(end - 1, 0)
    tokens = gl.arange(0, 64, layout=ROWS)
    blocks = blocks_of(table, first + tokens, last, BLOCK_SIZE)
    wait_then_trigger(PDL)  # for the latents of new tokens
    for i in range(tiles):
        at = i % STAGES
        position = first + i * 64 + tokens
        rows = rows_of(latents, blocks, position, last, block_stride, WIDTH, BLOCK_SIZE)[:, None]
        blocks = blocks_of(table, position + 64, last, BLOCK_SIZE)
        mbarrier.wait(free.index(at), ((i // STAGES) & 1) ^ 1)
        copy_async(ks.index(at), rows + dims)
        copy_async(turned.index(at), rows + RANK + few)
        async_copy.mbarrier_arrive(has.index(at), increment_count=False)


@gluon.jit
def blocks_of(table, tokens, last, BLOCK_SIZE: gl.constexpr):
    """Past the end it is the last token's again: what is in memory is a number, its weight 0."""
    return gl.load(table + gl.minimum(tokens, last) // BLOCK_SIZE)


@gluon.jit
def rows_of(
    latents, blocks, tokens, last, block_stride, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    offsets = gl.minimum(tokens, last) % BLOCK_SIZE * WIDTH
    return latents + blocks.to(gl.int64) * block_stride + offsets


@gluon.jit
def load_rows(
    q, row, lane, length, row_stride, head_stride,
    FIRST: gl.constexpr, SIZE: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Some features of the rows of q; 0 past the last of the sequence."""
    lanes = lane + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = FIRST + gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    starts = (row + lanes // HEADS) * row_stride + lanes % HEADS * head_stride
    live = (lanes // HEADS < length)[:, None]
    return gl.load(q + starts[:, None] + dims[None, :], mask=live, other=0.0)
