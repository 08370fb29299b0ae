"""Latent attention of 64 rows at a time on Hopper GPUs: 64 heads of a new token, or fewer of more.

Two warpgroups share a tile of 64 tokens in shared memory. Of the scores each computes half the
tokens; the weights meet in shared memory, and of the sums each computes half the features, so that
64 x 512 of them fit into registers. The next tile comes in while this one is multiplied:

    tensor cores   | Q K 0 |         | W V 0 | Q K 1 |         | W V 1 | …
    the rest               | softmax |               | softmax |
    copies         |         K 1             |         K 2             | …

In Gluon, a language in Triton that says which warps do what and when. It cannot be interpreted.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits
from quire.kernels.triton.latent.shapes import HOPPER

# By its name in later versions of Triton, or in the first.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_FIELDS: gl.constexpr = gl.constexpr(FIELDS.value)


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
):
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
        return
    table = block_tables + sequence.to(gl.int64) * table_stride

    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, RANK], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROPE], dtype)
    ks = gl.allocate_shared_memory(dtype, [2, 64, RANK], wide)
    turned = gl.allocate_shared_memory(dtype, [2, 64, ROPE], narrow)
    for i in gl.static_range(2):
        _fetch(
            ks.index(i), turned.index(i), latents, table, first + i * 64, end, block_stride,
            BLOCK_SIZE,
        )  # fmt: skip

    memory: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    small: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    qs = gl.allocate_shared_memory(
        dtype,
        [64, RANK],
        wide,
        _rows(q, row, lane, length, q_row_stride, q_head_stride, 0, RANK, HEADS, memory),
    )
    query_rope = gl.allocate_shared_memory(
        dtype,
        [64, ROPE],
        narrow,
        _rows(q, row, lane, length, q_row_stride, q_head_stride, RANK, ROPE, HEADS, small),
    )
    ws = gl.allocate_shared_memory(dtype, [64, 64], narrow)

    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    lanes = lane + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    last_seen = gl.minimum(start + lanes // HEADS, end - 1)
    keys = gl.arange(0, 64, layout=gl.SliceLayout(0, scores))
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, scores))
    none = gl.zeros([64, 64], gl.float32, scores)
    acc = gl.zeros([64, RANK], gl.float32, sums)

    async_copy.wait_group(1)
    fence_async_shared()
    _barrier()
    s = warpgroup_mma(qs, ks.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma(query_rope, turned.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    weights, _, top, total = _softmax(s, top, total, scale, first + keys, last_seen)
    ws.store(weights.to(dtype))
    for i in range(1, gl.cdiv(end - first, 64)):
        at = i % 2
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(ws, ks.index(1 - at), acc, is_async=True)
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        s = warpgroup_mma(qs, ks.index(at).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma(query_rope, turned.index(at).permute((1, 0)), s, is_async=True)
        acc = warpgroup_mma_wait(2, deps=[acc])
        _barrier()  # of both warpgroups: then the tile before this one is read no more
        _fetch(
            ks.index(1 - at), turned.index(1 - at), latents, table, first + (i + 1) * 64, end,
            block_stride, BLOCK_SIZE,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        weights, fade, top, total = _softmax(s, top, total, scale, first + i * 64 + keys, last_seen)
        ws.store(weights.to(dtype))
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, sums))[:, None]
    fence_async_shared()
    _barrier()
    acc = warpgroup_mma(ws, ks.index((gl.cdiv(end - first, 64) - 1) % 2), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)

    total = gl.where(total == 0.0, 1.0, total)
    log = top + gl.log2(total)
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
        gl.store(lse + place + lanes, log, mask=lanes // HEADS < length)
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
def _fetch(to, to_turned, latents, table, position, end, block_stride, BLOCK_SIZE: gl.constexpr):
    """Begin to copy 64 tokens' latents. Past the end it is the last token's again: what is in
    memory is a number, and its weight is 0."""
    rank: gl.constexpr = to.shape[1]
    rope: gl.constexpr = to_turned.shape[1]
    _fetch_part(
        to,
        latents,
        table,
        position,
        end,
        block_stride,
        rank + rope,
        0,
        BLOCK_SIZE,
        gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]),
    )
    _fetch_part(
        to_turned,
        latents,
        table,
        position,
        end,
        block_stride,
        rank + rope,
        rank,
        BLOCK_SIZE,
        gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]),
    )
    async_copy.commit_group()


@gluon.jit
def _fetch_part(
    to, latents, table, position, end, block_stride, slot_stride,
    FIRST: gl.constexpr, BLOCK_SIZE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    tokens = gl.minimum(position + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), end - 1)
    dims = FIRST + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, layout))
    blocks = gl.load(table + tokens // BLOCK_SIZE).to(gl.int64)
    starts = blocks * block_stride + tokens % BLOCK_SIZE * slot_stride
    _copy(to, latents + starts[:, None] + dims[None, :])


@gluon.jit
def _softmax(s, top, total, scale, keys, last_seen):
    """One step of the online softmax, as in `attention/softmax.py`."""
    s = gl.where(keys[None, :] <= last_seen[:, None], s * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf less -inf would be NaN
    weights = gl.exp2(s - base[:, None])
    fade = gl.exp2(top - base)
    return weights, fade, new_top, total * fade + gl.sum(weights, 1)
