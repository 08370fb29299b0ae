"""What both of Hopper's kernels for latents load: rows of q, and tiles of 64 tokens' latents.

Four warps copy tiles from their pages to shared memory, ahead of those that compute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FETCHING_WARPS = 4
# By their names in later versions of Triton, or in the first.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def wait_then_trigger(PDL: gl.constexpr):
    """As in `pdl.py`, whose functions are Triton's. The warps that fetch begin behind it."""
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
):
    """Tiles of 64 tokens from `first` to `end`, each to the next place in `ks` and `turned`."""
    STAGES: gl.constexpr = ks.shape[0]
    rank: gl.constexpr = ks.shape[2]
    slot_stride: gl.constexpr = rank + turned.shape[2]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in range(tiles):
        at = i % STAGES
        mbarrier.wait(free.index(at), ((i // STAGES) & 1) ^ 1)
        position = first + i * 64
        _fetch(
            ks.index(at), latents, table, position, end, block_stride, slot_stride, BLOCK_SIZE, wide
        )
        _fetch(
            turned.index(at), latents + rank, table, position, end, block_stride, slot_stride,
            BLOCK_SIZE, narrow,
        )  # fmt: skip
        async_copy.mbarrier_arrive(has.index(at), increment_count=False)


@gluon.jit
def _fetch(
    to,
    latents,
    table,
    position,
    end,
    block_stride,
    slot_stride: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    layout: gl.constexpr,
):
    """Past the end it is the last token's again: what is in memory is a number, its weight 0."""
    tokens = gl.minimum(position + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), end - 1)
    dims = gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, layout))
    blocks = gl.load(table + tokens // BLOCK_SIZE).to(gl.int64)
    starts = blocks * block_stride + tokens % BLOCK_SIZE * slot_stride
    copy_async(to, latents + starts[:, None] + dims[None, :])


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
