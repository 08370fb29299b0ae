"""Products of few tokens each with the matrices of several experts, in one call.

An item of work is some rows of one expert's matrix with all tokens of that expert. Two rows and
two tokens are multiplied at a time: all that is loaded is used twice, and on ARM that is as much as
registers hold. A sum goes over a row in one order, whatever other tokens there are.
"""

from __future__ import annotations

from numpy import float32

from quire.kernels.numba.code.memory import claim, helper, shift
from quire.kernels.numba.code.simd import load, splat, total
from quire.kernels.numba.sizes import GROUPED_TILE, LANES

ROWS = 32  # of a matrix, claimed at a time


def multiply(arguments):
    a = arguments[0]
    parts = (a.rows + ROWS - 1) // ROWS
    while True:
        item = claim(arguments, 0)
        if item >= a.num_groups * parts:
            return
        group, first = 3 * (item // parts), ROWS * (item % parts)
        expert, token, tokens = a.groups[group], a.groups[group + 1], a.groups[group + 2]
        weights = shift(a.weights, expert * a.rows * a.size)
        for row in range(first, min(first + ROWS, a.rows), GROUPED_TILE):
            w = shift(weights, row * a.size)
            for i in range(token, token + tokens, GROUPED_TILE):
                x, out = shift(a.x, i * a.size), shift(a.out, i * a.rows + row)
                if i + 1 < token + tokens:
                    _two_tokens(w, x, out, a.size, a.rows)
                else:
                    _one_token(w, x, out, a.size)


@helper
def _two_tokens(w, x, out, size, rows):
    zero = splat(float32(0.0))
    s0, s1, t0, t1 = zero, zero, zero, zero
    for i in range(0, size, LANES):
        v, u = load(w, i), load(w, size + i)
        x0, x1 = load(x, i), load(x, size + i)
        s0, s1 = s0 + v * x0, s1 + v * x1
        t0, t1 = t0 + u * x0, t1 + u * x1
    out[0], out[1] = total(s0), total(t0)
    out[rows], out[rows + 1] = total(s1), total(t1)


@helper
def _one_token(w, x, out, size):
    s, t = splat(float32(0.0)), splat(float32(0.0))
    for i in range(0, size, LANES):
        x0 = load(x, i)
        s, t = s + load(w, i) * x0, t + load(w, size + i) * x0
    out[0], out[1] = total(s), total(t)
