"""What the two warpgroups compute that share pairs of tiles on a Hopper GPU (`hopper_pairs.py`).

Both walk the same online softmax (`attention/softmax.py`), tile by tile: what a tile's weights are
relative to, its top, is found from that of the tile before it, which is the other warpgroup's. From
both tops either of them knows by how much its half of the sums fades.

    even                                 odd
    scores of the even tile              scores of the odd tile
    softmax; hands out weights, top  →   fades its sums, begins to add even weights × right half
    fades its sums,                      softmax; hands out weights, top
      adds even weights × left half      waits for the sums
    fades its sums,                  ←   fades its sums,
      adds odd weights × left half         adds odd weights × right half

A top is the greatest score so far, or an earlier one that is less by at most `_SLACK`: then weights
are up to 2**_SLACK, sums seldom fade, and a warp whose sums do not fade leaves them alone, as
FlashAttention 4 does. Measured on an H200: attention takes 4 % less time.
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

from quire.kernels.triton.gluon_names import barrier
from quire.kernels.triton.latent.hopper_pairs_store import (
    ROWS,
    SCORES,
    SUM_ROWS,
    SUMS,
    store,
    tell,
)

_SLACK: gl.constexpr = gl.constexpr(8.0)  # in units of log 2
_WEIGHTS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))


@gluon.jit
def compute_even(
    out, values, lse, qs, q_turned, ks, turned, tops, totals, has, free, ready, done,
    item, row, lane, length, first, end, num_splits, start, whole, pairs, scale,
    out_row_stride, out_head_stride,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
):  # fmt: skip
    last_seen = _last_seen(lane, start, end, HEADS)
    top = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64], gl.float32, ROWS)
    left = gl.zeros([64, 128], gl.float32, SUMS)
    right = gl.zeros([64, 128], gl.float32, SUMS)
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
        left, right = _add(left, right, weights, ks, fade, 0)
        left, right, weights = _finish_own(left, right, weights, free, 0)

        left, right, top, total = _add_others(
            left, right, top, total, ks, turned, tops, ready, phase, 1
        )
        left, right = _finish(left, right, free, 4)
    store(
        left, right, top, total, out, values, lse, ks, totals, done, item, row, lane, length,
        num_splits, out_row_stride, out_head_stride, HEADS, SPAN, 0,
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
    top = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64], gl.float32, ROWS)
    left = gl.zeros([64, 128], gl.float32, SUMS)
    right = gl.zeros([64, 128], gl.float32, SUMS)
    for pair in range(pairs):
        phase = pair & 1
        s = _scores(qs, q_turned, ks, turned, has, phase, 1)
        s = warpgroup_mma_wait(0, deps=[s])
        if pair >= whole:
            s = _masked(s, first + pair * 128 + 64, last_seen)
        left, right, top, total = _add_others(
            left, right, top, total, ks, turned, tops, ready, phase, 0
        )
        weights, fade, top, total = _softmax(s, top, total, scale)
        weights = weights.to(ks.dtype)
        _hand_out(weights, top, turned, tops, ready, 1)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        tell(free, 2)
        mbarrier.arrive(free[3], count=1)

        weights = gl.convert_layout(weights, _WEIGHTS)
        left, right = _add(left, right, weights, ks, fade, 6)
        left, right, weights = _finish_own(left, right, weights, free, 6)
    store(
        left, right, top, total, out, values, lse, ks, totals, done, item, row, lane, length,
        num_splits, out_row_stride, out_head_stride, HEADS, SPAN, 1,
    )  # fmt: skip


@gluon.jit
def _add_others(left, right, top, total, ks, turned, tops, ready, phase, TILE: gl.constexpr):
    """Begin to add the other warpgroup's weights of its tile times this one's half of its latents:
    the left half of the odd tile, the right half of the even one."""
    mbarrier.wait(ready[TILE], phase)
    new_top = tops.index(TILE).load(ROWS)
    fade = gl.exp2(top - _base(new_top))
    left, right = _add(left, right, turned.index(TILE), ks, fade, 2 + 2 * TILE)
    return left, right, new_top, total * fade


@gluon.jit
def _add(left, right, weights, ks, fade, QUARTER: gl.constexpr):
    """Begin to add weights times two quarters of a tile: one half of the sums fades while the other
    is multiplied."""
    left = _faded(left, fade)
    left = warpgroup_mma(weights, ks.index(QUARTER), left, is_async=True)
    right = _faded(right, fade)
    right = warpgroup_mma(weights, ks.index(QUARTER + 1), right, is_async=True)
    return left, right


@gluon.jit
def _finish(left, right, free, QUARTER: gl.constexpr):
    """Wait for the sums of two quarters, and let go of each."""
    left = warpgroup_mma_wait(1, deps=[left])
    tell(free, QUARTER)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    tell(free, QUARTER + 1)
    return left, right


@gluon.jit
def _finish_own(left, right, weights, free, QUARTER: gl.constexpr):
    """As `_finish`. The weights are in registers, which stay as long as they are multiplied."""
    left = warpgroup_mma_wait(1, deps=[left])
    tell(free, QUARTER)
    left, right, weights = warpgroup_mma_wait(0, deps=[left, right, weights])
    tell(free, QUARTER + 1)
    return left, right, weights


@gluon.jit
def _scores(qs, q_turned, ks, turned, has, phase, TILE: gl.constexpr):
    """Begin to multiply q with a tile, quarter by quarter as they arrive."""
    s = gl.zeros([64, 64], gl.float32, SCORES)
    zero = _zero_of(phase)
    for i in gl.static_range(4):
        s = _add_quarter(s, qs, ks, has, phase, zero, TILE, (i + 2 * TILE) % 4, i > 0)
    k = turned.index(zero + TILE).permute((1, 0))  # which came with the last quarter
    return warpgroup_mma(q_turned.index(zero), k, s, is_async=True)


@gluon.jit
def _add_quarter(
    s, qs, ks, has, phase, zero,
    TILE: gl.constexpr, QUARTER: gl.constexpr, USE_ACC: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(has[4 * TILE + QUARTER], phase)
    fence_async_shared()
    k = ks.index(zero + 4 * TILE + QUARTER).permute((1, 0))
    return warpgroup_mma(qs.index(zero + QUARTER), k, s, use_acc=USE_ACC, is_async=True)


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
    keys = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    return gl.where(keys[None, :] <= (last_seen - first)[:, None], s, float("-inf"))


@gluon.jit
def _softmax(s, top, total, scale):
    """One step of the online softmax."""
    highest = gl.max(s, 1) * scale
    new_top = gl.where(highest > top + _SLACK, highest, top)
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
    return gl.inline_asm_elementwise(
        _MULTIPLY_UNLESS_ONE,
        _OPERANDS,
        [acc, gl.convert_layout(fade, SUM_ROWS)[:, None]],
        dtype=gl.float32,
        is_pure=True,
        pack=64,
    )


def _multiply_unless_one() -> str:
    """PTX of a thread's 64 sums, of which two and two are of its two rows: a warp whose rows all
    fade by 1 skips them."""
    lines = ["{", ".reg .pred p, r;"]
    lines += [f"mov.f32 ${i}, ${64 + i};" for i in range(64)]
    lines += ["setp.neu.f32 p, $128, 0f3F800000;", "setp.neu.f32 r, $130, 0f3F800000;"]
    lines += ["or.pred p, p, r;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra.uni DONE;"]
    lines += [f"mul.f32 ${i}, ${i}, ${128 + i % 4 // 2 * 2};" for i in range(64)]
    return "\n".join([*lines, "DONE:", "}"])


_MULTIPLY_UNLESS_ONE: gl.constexpr = gl.constexpr(_multiply_unless_one())
_OPERANDS: gl.constexpr = gl.constexpr(",".join(["=&f"] * 64 + ["f"] * 128))


@gluon.jit
def _hand_out(weights, top, turned, tops, ready, TILE: gl.constexpr):
    """Put a tile's weights where its rotated features were, for the other warpgroup."""
    barrier()  # of four warps: each has waited for its own scores alone
    turned.index(TILE).store(weights)
    tops.index(TILE).store(top)
    fence_async_shared()
    tell(ready, TILE)


@gluon.jit
def _last_seen(lane, start, end, HEADS: gl.constexpr):
    lanes = lane + gl.arange(0, 64, layout=ROWS)
    return gl.minimum(start + lanes // HEADS, end - 1)
