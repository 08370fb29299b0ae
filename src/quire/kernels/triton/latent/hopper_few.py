"""Latent attention of up to 16 or 32 rows at a time on Hopper GPUs, as fast as latents are read.

Tensor cores want 64 rows on the left of a product. Here these are tokens: scores are
`[tokens, rows]`, and sums `[rank, rows]`, from the same tile of 64 tokens in shared memory. Four
warps fetch tiles (`hopper_tiles.py`) for the four that compute, which need less time for each.

In Gluon, a language in Triton that says which warps do what and when. It cannot be interpreted.
"""

from __future__ import annotations

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
from quire.kernels.triton.gluon_names import barrier
from quire.kernels.triton.latent.hopper_tiles import (
    FETCHING_WARPS,
    fetch_tiles,
    load_rows,
    wait_then_trigger,
)
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.sizes import cdiv

_FIELDS: gl.constexpr = gl.constexpr(FIELDS.value)
_THREADS: gl.constexpr = gl.constexpr(32 * FETCHING_WARPS)


def attend(
    q: Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scale: float,
    out: Tensor,
    rows: int,
) -> None:
    """As `hopper.attend`, with so many rows for each program."""
    _attend[(cdiv(splits.span * q.shape[1], rows), splits.count)](
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
        ROWS=rows,
        RANK=pages.rank,
        ROPE=pages.rope,
        BLOCK_SIZE=pages.block_size,
        num_warps=4,
        **pdl_launch(q.device),
        maxnreg=168,  # of which those that fetch give some to those that compute
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
    ROWS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    # What is read before the warps wait was written before the kernel ahead began.
    item = gl.program_id(1)
    field = splits_table + item * _FIELDS
    sequence = gl.load(field)
    first = gl.load(field + 2)
    end = gl.load(field + 3)
    length = gl.load(field + 5)
    lane = gl.program_id(0) * ROWS
    if (sequence < 0) | (lane // HEADS >= length):
        wait_then_trigger(PDL)
        return

    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, RANK], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROPE], dtype)
    ks = gl.allocate_shared_memory(dtype, [2, 64, RANK], wide)
    turned = gl.allocate_shared_memory(dtype, [2, 64, ROPE], narrow)
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
                q, out, values, lse, field, item, lane, ks, turned, has, free,
                first, end, length, tiles, scale,
                q_row_stride, q_head_stride, out_row_stride, out_head_stride,
                HEADS, SPAN, ROWS, RANK, ROPE, PDL,
            )),
            (fetch_tiles, (
                latents, table, ks, turned, has, free, first, end, tiles, block_stride, BLOCK_SIZE,
                PDL,
            )),
        ],
        [4],
        [64],
    )  # fmt: skip


@gluon.jit
def _compute(
    q, out, values, lse, field, item, lane, ks, turned, has, free,
    first, end, length, tiles, scale,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    ROWS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    wait_then_trigger(PDL)  # for q
    dtype: gl.constexpr = ks.dtype
    row = gl.load(field + 1).to(gl.int64)
    num_splits = gl.load(field + 4)
    start = gl.load(field + 6)
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    small: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    qs = gl.allocate_shared_memory(
        dtype,
        [ROWS, RANK],
        gl.NVMMASharedLayout.get_default_for([ROWS, RANK], dtype),
        load_rows(q, row, lane, length, q_row_stride, q_head_stride, 0, RANK, ROWS, HEADS, memory),
    )
    q_turned = gl.allocate_shared_memory(
        dtype,
        [ROWS, ROPE],
        gl.NVMMASharedLayout.get_default_for([ROWS, ROPE], dtype),
        load_rows(
            q, row, lane, length, q_row_stride, q_head_stride, RANK, ROPE, ROWS, HEADS, small
        ),
    )
    weights_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROWS], dtype)
    ws = gl.allocate_shared_memory(dtype, [64, ROWS], weights_layout)

    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    lanes = lane + gl.arange(0, ROWS, layout=gl.SliceLayout(0, sums))
    last_seen = gl.minimum(start + lanes // HEADS, end - 1)
    keys = gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, sums))
    totals = gl.zeros([64, ROWS], gl.float32, sums)  # of each token: added up once, at the end
    none = gl.zeros([64, ROWS], gl.float32, sums)
    acc = gl.zeros([RANK, ROWS], gl.float32, sums)
    for i in range(tiles):
        at = i % 2
        mbarrier.wait(has.index(at), (i // 2) & 1)
        fence_async_shared()
        barrier()
        k = ks.index(at)
        s = warpgroup_mma(k, qs.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma(turned.index(at), q_turned.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        seen = (first + i * 64 + keys)[:, None] <= last_seen[None, :]
        s = gl.where(seen, s * scale, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 0))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf less -inf would be NaN
        weights = gl.exp2(s - base[None, :])
        fade = gl.exp2(top - base)
        totals = totals * fade[None, :] + weights
        top = new_top
        ws.store(weights.to(dtype))
        acc = acc * fade[None, :]
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(k.permute((1, 0)), ws, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(free.index(at), count=1)

    total = gl.sum(totals, 0)
    total = gl.where(total == 0.0, 1.0, total)
    log = top + gl.log2(total)
    across: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [4, 1], [0, 1])
    value = gl.convert_layout(acc / total[None, :], across)
    mine = lane + gl.arange(0, ROWS, layout=gl.SliceLayout(0, across))
    dims = gl.arange(0, RANK, layout=gl.SliceLayout(1, across))
    token = mine // HEADS
    live = (token < length)[None, :]
    if num_splits == 1:
        rows = (row + token) * out_row_stride + mine % HEADS * out_head_stride
        gl.store(out + rows[None, :] + dims[:, None], value.to(out.dtype.element_ty), mask=live)
    else:
        place = item.to(gl.int64) * (SPAN * HEADS)
        gl.store(lse + place + lanes, log, mask=lanes // HEADS < length)
        gl.store(values + (place + mine)[None, :] * RANK + dims[:, None], value, mask=live)
