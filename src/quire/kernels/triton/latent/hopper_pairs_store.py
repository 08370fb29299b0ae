"""Where sums of a pair of warpgroups go in the end (`hopper_pairs.py`), and how they lie till then.

What is alone in its sequence goes to the output, through shared memory: threads have two features
of a row each, and stores are fast when warps write whole rows. Splits are stored as they are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.triton.gluon_names import barrier

SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, SCORES.value))
SUM_ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, SUMS.value))
_WHOLE_ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def store(
    left, right, top, total, out, values, lse, ks, totals, done, item, row, lane, length,
    num_splits, out_row_stride, out_head_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """One half of the sums, divided by the totals of both warpgroups' tiles."""
    totals.index(SIDE).store(total)
    tell(done, SIDE)
    mbarrier.wait(done[1 - SIDE], 0)
    total = total + totals.index(1 - SIDE).load(ROWS)
    total = gl.where(total == 0.0, 1.0, total)
    part = gl.convert_layout(1.0 / total, SUM_ROWS)[:, None]
    left, right = left * part, right * part
    if num_splits == 1:
        ks.index(2 * SIDE).store(left.to(ks.dtype))  # tiles are needed no more
        ks.index(2 * SIDE + 1).store(right.to(ks.dtype))
        barrier()
        _store_rows(out, ks, row, lane, length, out_row_stride, out_head_stride, HEADS, 2 * SIDE)
        _store_rows(
            out, ks, row, lane, length, out_row_stride, out_head_stride, HEADS, 2 * SIDE + 1
        )
    else:
        place = item.to(gl.int64) * (SPAN * HEADS)
        if SIDE == 0:
            each = lane + gl.arange(0, 64, layout=ROWS)
            gl.store(lse + place + each, top + gl.log2(total), mask=each // HEADS < length)
        lanes = lane + gl.arange(0, 64, layout=SUM_ROWS)
        dims = SIDE * 256 + gl.arange(0, 128, layout=gl.SliceLayout(0, SUMS))
        live = (lanes // HEADS < length)[:, None]
        pointers = values + (place + lanes)[:, None] * 512 + dims[None, :]
        gl.store(pointers, left.to(values.dtype.element_ty), mask=live)
        gl.store(pointers + 128, right.to(values.dtype.element_ty), mask=live)


@gluon.jit
def _store_rows(
    out, ks, row, lane, length, out_row_stride, out_head_stride,
    HEADS: gl.constexpr, QUARTER: gl.constexpr,
):  # fmt: skip
    lanes = lane + gl.arange(0, 64, layout=gl.SliceLayout(1, _WHOLE_ROWS))
    dims = QUARTER * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, _WHOLE_ROWS))
    token = lanes // HEADS
    rows = (row + token) * out_row_stride + lanes % HEADS * out_head_stride
    value = ks.index(QUARTER).load(_WHOLE_ROWS).to(out.dtype.element_ty)
    gl.store(out + rows[:, None] + dims[None, :], value, mask=(token < length)[:, None])


@gluon.jit
def tell(flags, which: gl.constexpr):
    """That all four warps are done."""
    barrier()
    mbarrier.arrive(flags[which], count=1)
