"""Latent attention of 64 rows at a time on Hopper GPUs: 64 heads of a new token, or fewer of more.

Four warps fetch tiles of 64 tokens, two tiles ahead, for the eight warps that compute. Of the
scores each of these two warpgroups computes half the tokens; the weights meet in shared memory, and
of the sums each computes half the features, so that 64 x 512 of them fit into registers.

    tensor cores   | Q K 0 |         | W V 0 | Q K 1 |         | W V 1 | Q K 2 | …
    the rest               | softmax |               | softmax |
    copies         | K 1                     | K 2                     | K 3 …

In Gluon, a language in Triton that says which warps do what and when. It cannot be interpreted.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits
from quire.kernels.triton.latent.hopper_fetch import FETCHING_WARPS, barrier, fetch_tiles
from quire.kernels.triton.latent.shapes import HOPPER

_FIELDS: gl.constexpr = gl.constexpr(FIELDS.value)
_THREADS: gl.constexpr = gl.constexpr(32 * FETCHING_WARPS)
_REGISTERS = 40  # of a thread that fetches; those that compute get the others


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
    _attend[(triton.cdiv(splits.span * q.shape[1], HOPPER.rows), splits.count)](
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
        num_warps=HOPPER.warps,
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
):
    item = gl.program_id(1)
    field = splits_table + item * _FIELDS
    sequence = gl.load(field)
    first = gl.load(field + 2)
    end = gl.load(field + 3)
    length = gl.load(field + 5)
    lane = gl.program_id(0) * 64
    if (sequence < 0) | (lane // HEADS >= length):
        return

    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, RANK], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROPE], dtype)
    ks = gl.allocate_shared_memory(dtype, [2, 64, RANK], wide)
    turned = gl.allocate_shared_memory(dtype, [2, 64, ROPE], narrow)
    qs = gl.allocate_shared_memory(dtype, [64, RANK], wide)
    q_turned = gl.allocate_shared_memory(dtype, [64, ROPE], narrow)
    ws = gl.allocate_shared_memory(dtype, [64, 64], narrow)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [2, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], flag)
    for i in gl.static_range(2):
        mbarrier.init(has.index(i), count=_THREADS)
        mbarrier.init(free.index(i), count=1)

    table = block_tables + sequence.to(gl.int64) * table_stride
    tiles = gl.cdiv(end - first, 64)
    gl.warp_specialize(
        [
            (_compute, (
                q, out, values, lse, field, item, lane, qs, q_turned, ks, turned, ws, has, free,
                first, end, length, tiles, scale,
                q_row_stride, q_head_stride, out_row_stride, out_head_stride,
                HEADS, SPAN, RANK, ROPE,
            )),
            (fetch_tiles, (
                latents, table, ks, turned, has, free, first, end, tiles, block_stride, BLOCK_SIZE,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


@gluon.jit
def _compute(
    q, out, values, lse, field, item, lane, qs, q_turned, ks, turned, ws, has, free,
    first, end, length, tiles, scale,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = ws.dtype
    row = gl.load(field + 1).to(gl.int64)
    num_splits = gl.load(field + 4)
    start = gl.load(field + 6)
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    small: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    qs.store(_rows(q, row, lane, length, q_row_stride, q_head_stride, 0, RANK, HEADS, memory))
    q_turned.store(
        _rows(q, row, lane, length, q_row_stride, q_head_stride, RANK, ROPE, HEADS, small)
    )

    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    lanes = lane + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    last_seen = gl.minimum(start + lanes // HEADS, end - 1)
    keys = gl.arange(0, 64, layout=gl.SliceLayout(0, scores))
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    totals = gl.zeros([64, 64], gl.float32, scores)  # of each column: added up once, at the end
    none = gl.zeros([64, 64], gl.float32, scores)
    acc = gl.zeros([64, RANK], gl.float32, sums)

    mbarrier.wait(has.index(0), 0)
    fence_async_shared()
    barrier()
    s = warpgroup_mma(qs, ks.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma(q_turned, turned.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    weights, _, top, totals = _softmax(s, top, totals, scale, first + keys, last_seen)
    ws.store(weights.to(dtype))
    for i in range(1, tiles):
        at = i % 2
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(ws, ks.index(1 - at), acc, is_async=True)
        mbarrier.wait(has.index(at), (i // 2) & 1)
        fence_async_shared()
        s = warpgroup_mma(qs, ks.index(at).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma(q_turned, turned.index(at).permute((1, 0)), s, is_async=True)
        acc = warpgroup_mma_wait(2, deps=[acc])
        barrier()  # of both warpgroups: then the tile before this one is read no more
        mbarrier.arrive(free.index(1 - at), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        weights, fade, top, totals = _softmax(
            s, top, totals, scale, first + i * 64 + keys, last_seen
        )
        ws.store(weights.to(dtype))
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, sums))[:, None]
    fence_async_shared()
    barrier()
    acc = warpgroup_mma(ws, ks.index((tiles - 1) % 2), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    total = gl.sum(totals, 1)
    total = gl.where(total == 0.0, 1.0, total)
    value = acc / gl.convert_layout(total, gl.SliceLayout(1, sums))[:, None]
    mine = lane + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    dims = gl.arange(0, RANK, layout=gl.SliceLayout(0, sums))
    token = mine // HEADS
    live = (token < length)[:, None]
    if num_splits == 1:
        rows = (row + token) * out_row_stride + mine % HEADS * out_head_stride
        gl.store(out + rows[:, None] + dims[None, :], value.to(out.dtype.element_ty), mask=live)
    else:
        place = item.to(gl.int64) * (SPAN * HEADS)
        gl.store(lse + place + lanes, top + gl.log2(total), mask=lanes // HEADS < length)
        gl.store(values + (place + mine)[:, None] * RANK + dims[None, :], value, mask=live)


@gluon.jit
def _rows(
    q, row, lane, length, row_stride, head_stride,
    FIRST: gl.constexpr, SIZE: gl.constexpr, HEADS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Some features of 64 rows of q; 0 past the last of the sequence."""
    lanes = lane + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    dims = FIRST + gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    starts = (row + lanes // HEADS) * row_stride + lanes % HEADS * head_stride
    live = (lanes // HEADS < length)[:, None]
    return gl.load(q + starts[:, None] + dims[None, :], mask=live, other=0.0)


@gluon.jit
def _softmax(s, top, totals, scale, keys, last_seen):
    """One step of the online softmax, as in `attention/softmax.py`."""
    s = gl.where(keys[None, :] <= last_seen[:, None], s * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf less -inf would be NaN
    weights = gl.exp2(s - base[:, None])
    fade = gl.exp2(top - base)
    return weights, fade, new_top, totals * fade[:, None] + weights
