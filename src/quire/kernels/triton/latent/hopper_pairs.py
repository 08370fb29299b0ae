"""Latent attention of 64 rows on Hopper GPUs, two tiles of 64 tokens at a time.

A program has three warpgroups. One copies tiles from their pages to shared memory
(`hopper_pairs_fetch.py`). The other two compute (`hopper_pairs_compute.py`): the first has the
even tiles' scores and softmax and the left half of the sums' 512 features, the second the odd
tiles' and the right half. Each hands its weights to the other through shared memory. While one
computes a softmax, the tensor cores multiply for the other:

    first     | Q K 0       | softmax 0 | W V 0 left  |             | W V 1 left  | Q K 2 …
    second                  | Q K 1                   | softmax 1   | W V 1 right | Q K 3 …
                                        | W V 0 right               |

Shared memory holds q and two tiles, and no more. So a tile is copied in quarters, each as soon as
the one before it in its place was multiplied for the last time; scores begin with a tile's first
quarter that arrives; a tile's weights lie where its rotated features were, which only scores need.

In Gluon, a language in Triton that says which warps do what and when. Triton cannot interpret it;
`tests/gluon_model.py` can, as far as results and barriers go.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits
from quire.kernels.triton.latent.hopper_pairs_compute import compute_even, compute_odd
from quire.kernels.triton.latent.hopper_pairs_fetch import fetch_pairs
from quire.kernels.triton.latent.hopper_tiles import FETCHING_WARPS, wait_then_trigger
from quire.kernels.triton.latent.shapes import HOPPER_PAIRS
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.sizes import cdiv

_FIELDS: gl.constexpr = gl.constexpr(FIELDS.value)
_THREADS: gl.constexpr = gl.constexpr(32 * FETCHING_WARPS)
_REGISTERS, _REGISTERS_TO_COPY = 216, 72  # of a thread that computes, and of one that copies


def attend(
    q: Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scale: float,
    out: Tensor,
) -> None:
    """Fill the rows of `out` whose sequences have one split, and `splits` with what the others get.

    `scale` is in units of log 2.
    """
    _attend[(cdiv(splits.span * q.shape[1], HOPPER_PAIRS.rows), splits.count)](
        q,
        out,
        splits.table,
        splits.values,
        splits.lse,
        batch.block_tables,
        pages.values,
        scale,
        *q.stride()[:2],
        *out.stride()[:2],
        pages.values.stride(0),
        batch.block_tables.stride(0),
        HEADS=q.shape[1],
        SPAN=splits.span,
        RANK=pages.rank,
        ROPE=pages.rope,
        BLOCK_SIZE=pages.block_size,
        REGISTERS=_REGISTERS,
        REGISTERS_TO_COPY=_REGISTERS_TO_COPY,
        num_warps=HOPPER_PAIRS.warps,
        **pdl_launch(q.device),
    )


@gluon.jit(do_not_specialize=["table_stride"])
def _attend(
    q,
    out,
    splits_table,
    values,
    lse,
    block_tables,
    latents,
    scale,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    block_stride,
    table_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    REGISTERS: gl.constexpr,
    REGISTERS_TO_COPY: gl.constexpr,
    PDL: gl.constexpr,
):
    # What is read before the warps that copy wait was written before the kernel ahead began.
    item = gl.program_id(1)
    field = splits_table + item * _FIELDS
    sequence = gl.load(field)
    row = gl.load(field + 1).to(gl.int64)
    first = gl.load(field + 2)
    end = gl.load(field + 3)
    num_splits = gl.load(field + 4)
    length = gl.load(field + 5)
    start = gl.load(field + 6)
    lane = gl.program_id(0) * 64
    if (sequence < 0) | (lane // HEADS >= length):
        wait_then_trigger(PDL)
        return

    # Of a tile t of a pair, quarter i is at 4 * t + i.
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, RANK // 4], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROPE], dtype)
    qs = gl.allocate_shared_memory(dtype, [4, 64, RANK // 4], wide)
    q_turned = gl.allocate_shared_memory(dtype, [1, 64, ROPE], narrow)
    ks = gl.allocate_shared_memory(dtype, [8, 64, RANK // 4], wide)
    turned = gl.allocate_shared_memory(dtype, [2, 64, ROPE], narrow)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tops = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    has = _barriers(8, _THREADS)  # a quarter was copied
    free = _barriers(8, 1)  # it is needed no more
    ready = _barriers(2, 1)  # a tile's weights and top are there
    done = _barriers(2, 1)  # a warpgroup's totals are there

    table = block_tables + sequence.to(gl.int64) * table_stride
    pairs = gl.cdiv(end - first, 128)
    if pairs == 0:  # else what is stored depends on copies, and these wait
        wait_then_trigger(PDL)
    # All rows see all tokens of these: those before the first new token, and itself.
    whole = gl.maximum(gl.minimum(start + 1, end) - first, 0) // 128
    gl.warp_specialize(
        [
            (compute_even, (
                out, values, lse, qs, q_turned, ks, turned, tops, totals, has, free, ready, done,
                item, row, lane, length, first, end, num_splits, start, whole, pairs, scale,
                out_row_stride, out_head_stride, HEADS, SPAN,
            )),
            (compute_odd, (
                out, values, lse, qs, q_turned, ks, turned, tops, totals, has, free, ready, done,
                item, row, lane, length, first, end, num_splits, start, whole, pairs, scale,
                out_row_stride, out_head_stride, HEADS, SPAN,
            )),
            (fetch_pairs, (
                q, latents, table, qs, q_turned, ks, turned, has, free,
                row, lane, length, first, end, pairs, q_row_stride, q_head_stride, block_stride,
                HEADS, BLOCK_SIZE, PDL,
            )),
        ],
        [4, 4],
        [REGISTERS, REGISTERS_TO_COPY],
    )  # fmt: skip


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Each in memory of its own: the compiler lets all warps wait for each other between two that
    it takes for the same."""
    barriers = (_barrier(COUNT),)
    for _ in gl.static_range(NUMBER - 1):
        barriers = barriers + (_barrier(COUNT),)  # type: ignore[assignment]  # noqa: RUF005
    return barriers


@gluon.jit
def _barrier(COUNT: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(memory, count=COUNT)
    return memory
