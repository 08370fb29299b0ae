"""What the two warpgroups compute that share pairs of tiles on a Hopper GPU (`hopper_pairs.py`).

Both walk the same online softmax (`attention/softmax.py`), tile by tile: a tile's top is found from
the top of the tile before it, which is the other warpgroup's. From both tops either of them knows
by how much its half of the sums fades.

    even                                 odd
    scores of the even tile              scores of the odd tile
    softmax; hands out weights, top  →   fades its sums, begins to add even weights × right half
    fades its sums,                      softmax; hands out weights, top
      adds even weights × left half      waits for the sums
    fades its sums,                  ←   fades its sums,
      adds odd weights × left half         adds odd weights × right half
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.triton.latent.hopper_tiles import barrier

_SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_SUM_ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, _SUMS.value))
_WEIGHTS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 2))


@gluon.jit
def compute_even(
    out, values, lse, qs, q_turned, ks, turned, tops, totals, has, free, ready, done,
    item, row, lane, length, first, end, num_splits, start, whole, pairs, scale,
    out_row_stride, out_head_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
):  # fmt: skip
    last_seen = _last_seen(lane, start, end, HEADS)
    top = gl.full([64], float("-inf"), gl.float32, _ROWS)
    total = gl.zeros([64], gl.float32, _ROWS)
    acc = gl.zeros([64, 256], gl.float32, _SUMS)
    for pair in range(pairs):
        phase = pair & 1
        s = _scores(qs, q_turned, ks, turned, has, phase, 0)
        s = warpgroup_mma_wait(0, deps=[s])
        if pair >= whole:
            s = _masked(s, first + pair * 128, last_seen)
        weights, fade, top, total = _softmax(s, top, total, scale)
        weights = weights.to(ks.dtype)
        _hand_out(weights, top, turned, tops, ready, 0)

        weights = gl.convert_layout(weights, _WEIGHTS)
        acc = warpgroup_mma(weights, ks.index(0), _faded(acc, fade), is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        _tell(free, 0)

        acc, top, total = _add_others(acc, top, total, ks, turned, tops, ready, phase, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _tell(free, 2)
    _store(
        acc, top, total, out, values, lse, totals, done, item, row, lane, length, num_splits,
        out_row_stride, out_head_stride, HEADS, SPAN, 0,
    )  # fmt: skip


@gluon.jit
def compute_odd(
    out, values, lse, qs, q_turned, ks, turned, tops, totals, has, free, ready, done,
    item, row, lane, length, first, end, num_splits, start, whole, pairs, scale,
    out_row_stride, out_head_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
):  # fmt: skip
    last_seen = _last_seen(lane, start, end, HEADS)
    top = gl.full([64], float("-inf"), gl.float32, _ROWS)
    total = gl.zeros([64], gl.float32, _ROWS)
    acc = gl.zeros([64, 256], gl.float32, _SUMS)
    for pair in range(pairs):
        phase = pair & 1
        s = _scores(qs, q_turned, ks, turned, has, phase, 1)
        s = warpgroup_mma_wait(0, deps=[s])
        if pair >= whole:
            s = _masked(s, first + pair * 128 + 64, last_seen)
        acc, top, total = _add_others(acc, top, total, ks, turned, tops, ready, phase, 0)
        weights, fade, top, total = _softmax(s, top, total, scale)
        weights = weights.to(ks.dtype)
        _hand_out(weights, top, turned, tops, ready, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _tell(free, 1)

        weights = gl.convert_layout(weights, _WEIGHTS)
        acc = warpgroup_mma(weights, ks.index(3), _faded(acc, fade), is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        _tell(free, 3)
    _store(
        acc, top, total, out, values, lse, totals, done, item, row, lane, length, num_splits,
        out_row_stride, out_head_stride, HEADS, SPAN, 1,
    )  # fmt: skip


@gluon.jit
def _add_others(acc, top, total, ks, turned, tops, ready, phase, TILE: gl.constexpr):
    """Begin to add the other warpgroup's weights of its tile times this one's half of its latents:
    the left half of the odd tile, the right half of the even one."""
    mbarrier.wait(ready.index(TILE), phase)
    new_top = tops.index(TILE).load(_ROWS)
    fade = gl.exp2(top - _base(new_top))
    acc = warpgroup_mma(turned.index(TILE), ks.index(1 + TILE), _faded(acc, fade), is_async=True)
    return acc, new_top, total * fade


@gluon.jit
def _scores(qs, q_turned, ks, turned, has, phase, TILE: gl.constexpr):
    """Begin to multiply q with a tile, with that half first that is there first."""
    none = gl.zeros([64, 64], gl.float32, _SCORES)
    zero = _zero_of(phase)
    mbarrier.wait(has.index(3 * TILE), phase)
    fence_async_shared()
    k = ks.index(zero + 3 * TILE).permute((1, 0))
    s = warpgroup_mma(qs.index(zero + TILE), k, none, use_acc=False, is_async=True)
    mbarrier.wait(has.index(1 + TILE), phase)
    fence_async_shared()
    k = ks.index(zero + 1 + TILE).permute((1, 0))
    s = warpgroup_mma(qs.index(zero + 1 - TILE), k, s, is_async=True)
    k = turned.index(zero + TILE).permute((1, 0))
    return warpgroup_mma(q_turned.index(zero), k, s, is_async=True)


@gluon.jit
def _zero_of(number):
    """0, of which the compiler does not know that it is. What is found from it is found anew in
    each turn: dozens of addresses would not fit into registers from one turn to the next."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _masked(s, first, last_seen):
    """Without the tokens that a row does not see; the first of the 64 is at `first`."""
    keys = gl.arange(0, 64, layout=gl.SliceLayout(0, _SCORES))
    return gl.where(keys[None, :] <= (last_seen - first)[:, None], s, float("-inf"))


@gluon.jit
def _softmax(s, top, total, scale):
    """One step of the online softmax."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    base = _base(new_top)
    weights = gl.exp2(s * scale - base[:, None])
    fade = gl.exp2(top - base)
    return weights, fade, new_top, total * fade + gl.sum(weights, 1)


@gluon.jit
def _base(top):
    """A row that has seen nothing yet has no top: -inf less -inf would be NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _faded(acc, fade):
    return acc * gl.convert_layout(fade, _SUM_ROWS)[:, None]


@gluon.jit
def _hand_out(weights, top, turned, tops, ready, TILE: gl.constexpr):
    """Put a tile's weights where its rotated features were, for the other warpgroup."""
    barrier()  # of four warps: each has waited for its own scores alone
    turned.index(TILE).store(weights)
    tops.index(TILE).store(top)
    fence_async_shared()
    _tell(ready, TILE)


@gluon.jit
def _tell(flags, which: gl.constexpr):
    """That all four warps are done."""
    barrier()
    mbarrier.arrive(flags.index(which), count=1)


@gluon.jit
def _last_seen(lane, start, end, HEADS: gl.constexpr):
    lanes = lane + gl.arange(0, 64, layout=_ROWS)
    return gl.minimum(start + lanes // HEADS, end - 1)


@gluon.jit
def _store(
    acc, top, total, out, values, lse, totals, done, item, row, lane, length, num_splits,
    out_row_stride, out_head_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """One half of the sums, divided by the totals of both warpgroups' tiles."""
    totals.index(SIDE).store(total)
    _tell(done, SIDE)
    mbarrier.wait(done.index(1 - SIDE), 0)
    total = total + totals.index(1 - SIDE).load(_ROWS)
    total = gl.where(total == 0.0, 1.0, total)

    value = _faded(acc, 1.0 / total)
    lanes = lane + gl.arange(0, 64, layout=_SUM_ROWS)
    dims = SIDE * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, _SUMS))
    token = lanes // HEADS
    live = (token < length)[:, None]
    if num_splits == 1:
        rows = (row + token) * out_row_stride + lanes % HEADS * out_head_stride
        gl.store(out + rows[:, None] + dims[None, :], value.to(out.dtype.element_ty), mask=live)
    else:
        place = item.to(gl.int64) * (SPAN * HEADS)
        if SIDE == 0:
            each = lane + gl.arange(0, 64, layout=_ROWS)
            gl.store(lse + place + each, top + gl.log2(total), mask=each // HEADS < length)
        gl.store(values + (place + lanes)[:, None] * 512 + dims[None, :], value, mask=live)
