"""A softmax over a long row, built tile by tile.

`top` is the largest score so far, `total` the sum of `2 ** (score - top)`, and `acc` the values
weighted the same way. A new tile with a larger score scales the old sums down to the new `top`.
Scores are in units of log 2, since exp2 is what the hardware has. A sink is added to `total` once,
at the end: where KV is split, when the splits are combined.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.scoring import Scoring
from quire.kernels.triton.attention.fp8_pairs import even_and_odd, split_scale

LOG2_E = 1.4426950408889634
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)


def scoring_arguments(scoring: Scoring, q: Tensor) -> tuple[float, float, Tensor]:
    """What a kernel takes for scale and soft cap, in units of log 2, and sinks.

    A kernel that is told that there is no cap or sink does not look at these.
    """
    cap = 0.0 if scoring.softcap is None else scoring.softcap * LOG2_E
    return scoring.scale * LOG2_E, cap, q if scoring.sinks is None else scoring.sinks


@triton.jit
def nothing_yet(ROWS: tl.constexpr, V_WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """`top`, `total` and `acc` before the first tile."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SCALED:
        even = tl.zeros([ROWS, V_WIDTH // 2], tl.float32)
        return top, total, (even, even)
    else:
        return top, total, (tl.zeros([ROWS, V_WIDTH], tl.float32),)


@triton.jit
def average(total, acc, SCALED: tl.constexpr):
    """After the last tile: the weighted values. A row that has seen nothing becomes zeros."""
    total = tl.where(total == 0.0, 1.0, total)[:, None]
    if SCALED:
        return tl.interleave(acc[0], acc[1]) / total
    else:
        return acc[0] / total


@triton.jit
def add_sink(total, top, sink):
    """`total` with the weight of each row's sink. Where that weight is too large for a number,
    what else the row has seen is nothing beside it."""
    return total + tl.exp2(sink.to(tl.float32) * _LOG2_E - top)


@triton.jit
def soft_cap(scores, cap):
    """`cap * tanh(scores / cap)`."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * _LOG2_E / cap)))


@triton.jit
def absorb(
    q,
    k,
    v,
    k_scale,
    v_scale,
    seen,
    scale,
    cap,
    top,
    total,
    acc,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """Add a tile to the running softmax. float32 is multiplied exactly, not as tf32.

    The scales of fp8 go to scores and weights, of which there are fewer than of K's numbers. Those
    of V are in the scores as powers of two: so `top` is that of weight and scale together, and no
    weight that matters is too small for float16.
    """
    if SCALED:
        k_even, k_odd = even_and_odd(k, q[0].dtype, CONVERTS)
        scores = tl.dot(q[0], tl.trans(k_even), input_precision="ieee")
        scores = tl.dot(q[1], tl.trans(k_odd), scores, input_precision="ieee")
        power, inverse, left = split_scale(v_scale)
        scores = scores * (k_scale * scale)[None, :]
        if CAPPED:
            scores = soft_cap(scores, cap)
        scores = scores + power[None, :]
        scale = 1.0
    else:
        scores = tl.dot(q[0], tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = soft_cap(scores * scale, cap)
            scale = 1.0
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new_top
    if MASKED:  # a row that has seen nothing yet has no top: -inf less -inf would be NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(top - base)
    if SCALED:
        total = total * fade + tl.sum(weights * inverse[None, :], 1)
        weights = (weights * left[None, :]).to(q[0].dtype)
        even, odd = even_and_odd(v, q[0].dtype, CONVERTS)
        even = tl.dot(weights, even, acc[0] * fade[:, None], input_precision="ieee")
        odd = tl.dot(weights, odd, acc[1] * fade[:, None], input_precision="ieee")
        return new_top, total, (even, odd)
    else:
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc[0] * fade[:, None], input_precision="ieee")
        return new_top, total, (acc,)
