"""What happens to each token by itself, in one pass over memory each.

Threads claim a few rows at a time. All is computed in float32 and rounded when it is stored.
"""

from __future__ import annotations

import math

from numpy import float32, int64

from quire.kernels.numba.code.exp import exp
from quire.kernels.numba.code.memory import claim, helper, shift
from quire.kernels.numba.code.simd import (
    load,
    minus_magnitude,
    splat,
    store,
    total,
    where_negative,
)
from quire.kernels.numba.sizes import LANES

ROWS = 4  # claimed at a time

# Of GELU by tanh: what x and its cube are multiplied with.
LINEAR = float32(math.sqrt(8 / math.pi))
CUBIC = float32(0.044715 * math.sqrt(8 / math.pi))


def add_and_normalise(arguments):
    a = arguments[0]
    while True:
        first = ROWS * claim(arguments, 0)
        if first >= a.rows:
            return
        for row in range(first, min(first + ROWS, a.rows)):
            stream, out = shift(a.stream, row * a.size), shift(a.out, row * a.size)
            if a.has_delta:
                delta = shift(a.delta, row * a.size)
                for i in range(0, a.size, LANES):
                    store(stream, i, load(stream, i) + load(delta, i))
            factor = _inverse_root_mean_square(stream, a.size, a.eps)
            for i in range(0, a.size, LANES):
                store(out, i, load(stream, i) * factor * load(a.weight, i))


@helper
def _inverse_root_mean_square(x, size, eps):
    squares = splat(float32(0.0))
    for i in range(0, size, LANES):
        values = load(x, i)
        squares = squares + values * values
    return float32(1.0) / math.sqrt(total(squares) / float32(size) + eps)


# The sigmoid of both is spelt out: as a function of its own, it costs bfloat16 4 % (measured).


def silu_and_multiply(arguments):
    a = arguments[0]
    one = splat(float32(1.0))
    while True:
        first = ROWS * claim(arguments, 0)
        if first >= a.rows:
            return
        for row in range(first, min(first + ROWS, a.rows)):
            gate, out = shift(a.gate_up, 2 * row * a.features), shift(a.out, row * a.features)
            up = shift(gate, a.features)
            for i in range(0, a.features, LANES):
                x = load(gate, i)
                power = exp(minus_magnitude(x))  # at most 1: nothing overflows
                sigmoid = where_negative(x, power, one) / (one + power)
                store(out, i, x * sigmoid * load(up, i))


def gelu_and_multiply(arguments):
    """By the approximation with tanh, of which `(1 + tanh(x)) / 2` is `sigmoid(2 * x)`."""
    a = arguments[0]
    one = splat(float32(1.0))
    while True:
        first = ROWS * claim(arguments, 0)
        if first >= a.rows:
            return
        for row in range(first, min(first + ROWS, a.rows)):
            gate, out = shift(a.gate_up, 2 * row * a.features), shift(a.out, row * a.features)
            up = shift(gate, a.features)
            for i in range(0, a.features, LANES):
                x = load(gate, i)
                twice = x * (x * x * CUBIC + splat(LINEAR))
                power = exp(minus_magnitude(twice))
                sigmoid = where_negative(twice, power, one) / (one + power)
                store(out, i, x * sigmoid * load(up, i))


def rotate_and_write(arguments):
    a = arguments[0]
    k_features = (a.heads + a.kv_heads) * a.k_width  # and those of q
    while True:
        first = ROWS * claim(arguments, 0)
        if first >= a.tokens:
            return
        for token in range(first, min(first + ROWS, a.tokens)):
            cos, sin = shift(a.cos, token * a.turn_stride), shift(a.sin, token * a.turn_stride)
            x = shift(a.qkv, token * (k_features + a.kv_heads * a.v_width))
            for head in range(a.heads):
                place = (token * a.heads + head) * a.k_width
                _turn(a, shift(x, head * a.k_width), head, cos, sin, shift(a.q, place))
            slot = a.slots[token]
            if slot < 0:
                continue
            block, offset = slot // a.block_size * a.block_stride, slot % a.block_size
            for kv_head in range(a.kv_heads):
                head = a.heads + kv_head
                token_place = kv_head * a.block_size + offset
                k = shift(a.k, block + token_place * a.k_width)
                _turn(a, shift(x, head * a.k_width), head, cos, sin, k)
                source = shift(x, k_features + kv_head * a.v_width)
                v = shift(a.v, block + token_place * a.v_width)
                for i in range(0, a.v_width, LANES):
                    store(v, i, load(source, i))


@helper
def _turn(a, x, head, cos, sin, out):
    """Each feature with the one half a head away, both normalised first where there is a weight."""
    half = a.k_width // 2
    factor = float32(1.0)
    if a.has_weight:
        factor = _inverse_root_mean_square(x, a.k_width, a.eps)
    weight = shift(a.weight, int64(head) * a.k_width)
    for i in range(0, half, LANES):
        low, high = load(x, i), load(x, half + i)
        if a.has_weight:
            low = low * factor * load(weight, i)
            high = high * factor * load(weight, half + i)
        store(out, i, low * load(cos, i) + high * load(sin, i))
        store(out, half + i, high * load(cos, half + i) + low * load(sin, half + i))
