"""Products with float32 matrices whose rows are interleaved by sixteen, over all threads.

An item of work is some rows of one matrix with all tokens that go through that matrix: those of an
expert, or all there are. Weights come from memory once, for the first tile of tokens
(`float_tile.py`), and from the caches for the others.
"""

from __future__ import annotations

from numpy import int64

from quire.kernels.numba.code.float_tile import multiply_tile
from quire.kernels.numba.code.gguf.multiply import store_gated, store_products
from quire.kernels.numba.code.memory import claim, floats_on_stack, helper, shift
from quire.kernels.numba.sizes import LANES

MOST_TOKENS = 8  # of a tile
PRODUCTS = 2 * MOST_TOKENS * LANES


def multiply(arguments):
    a = arguments[0]
    both = floats_on_stack(PRODUCTS)
    steps = a.groups  # two groups each: of the gate and of up, or neighbours
    if not a.is_gated:
        steps = (a.groups + 1) // 2
    parts = (steps + a.steps_at_once - 1) // a.steps_at_once
    runs = int64(1)
    if a.has_runs:
        runs = a.runs[0]
    while True:
        item = claim(arguments, 0)
        if item >= runs * parts:
            return
        matrix, token, end = int64(0), int64(0), a.tokens
        if a.has_runs:
            run = shift(a.runs, 1 + 3 * (item // parts))
            matrix, token, end = run[0], run[1], run[2]
        weights = shift(a.weights, matrix * a.matrix_size)
        step = item % parts * a.steps_at_once
        for each in range(step, min(step + a.steps_at_once, steps)):
            _multiply_step(a, weights, each, token, end, both)


@helper
def _multiply_step(a, weights, step, token, end, both):
    one, other = step, a.groups + step
    if not a.is_gated:
        one = 2 * step
        other = min(one + 1, a.groups - 1)  # the last may be alone
    group_size = a.size * LANES
    first, second = shift(weights, one * group_size), shift(weights, other * group_size)
    while token < end:
        x = shift(a.x, token * a.size)
        tokens = _multiply_some(first, second, x, a.size, end - token, both)
        if a.is_gated:
            store_gated(a, step, token, tokens, both, shift(both, tokens * LANES))
        else:
            store_products(a, one, token, tokens, both)
            store_products(a, other, token, tokens, shift(both, tokens * LANES))
        token += tokens


@helper
def _multiply_some(first, second, x, size, left, both):
    """As many tokens as the largest tile that they fill; returns how many."""
    if left >= 8:
        multiply_tile(8, first, second, x, size, both)
        return int64(8)
    if left >= 4:
        multiply_tile(4, first, second, x, size, both)
        return int64(4)
    if left >= 2:
        multiply_tile(2, first, second, x, size, both)
        return int64(2)
    multiply_tile(1, first, second, x, size, both)
    return int64(1)
