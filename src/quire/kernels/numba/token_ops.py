"""What happens to each token by itself, in one pass over memory each.

Threads claim a few rows at a time. All is computed in float32 and rounded when it is stored.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numpy import float32, int64

from quire.kernels.numba.exp import exp
from quire.kernels.numba.kernel import Count, Elements, Int64s, Kernel, Real, Version
from quire.kernels.numba.memory import claim, helper, shift
from quire.kernels.numba.simd import (
    LANES,
    load,
    minus_magnitude,
    splat,
    store,
    total,
    where_negative,
)

ROWS = 4  # claimed at a time


class NormArguments(NamedTuple):
    next: Count
    rows: Count
    size: Count
    stream: Elements  # [rows, size]
    delta: Elements
    has_delta: Count
    weight: Elements  # [size]
    out: Elements  # [rows, size]
    eps: Real
    version: Version


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


class GateArguments(NamedTuple):
    next: Count
    rows: Count
    features: Count
    gate_up: Elements  # [rows, 2 * features]
    out: Elements  # [rows, features]
    version: Version


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


class RotateArguments(NamedTuple):
    next: Count
    tokens: Count
    heads: Count
    kv_heads: Count
    block_size: Count
    head_dim: Count
    block_stride: Count  # numbers from one block to the next
    qkv: Elements  # [tokens, heads + 2 * kv_heads, head_dim]
    cos: Elements
    sin: Elements
    turn_stride: Count  # numbers from one token's cosines to the next's
    weight: Elements  # [heads + kv_heads, head_dim]
    has_weight: Count
    slots: Int64s
    q: Elements  # [tokens, heads, head_dim]
    pool: Elements  # the layer's own K and V in the first block
    eps: Real
    version: Version


def rotate_and_write(arguments):
    a = arguments[0]
    page_size = a.block_size * a.head_dim
    while True:
        first = ROWS * claim(arguments, 0)
        if first >= a.tokens:
            return
        for token in range(first, min(first + ROWS, a.tokens)):
            cos, sin = shift(a.cos, token * a.turn_stride), shift(a.sin, token * a.turn_stride)
            x = shift(a.qkv, token * (a.heads + 2 * a.kv_heads) * a.head_dim)
            for head in range(a.heads):
                place = (token * a.heads + head) * a.head_dim
                _turn(a, shift(x, head * a.head_dim), head, cos, sin, shift(a.q, place))
            slot = a.slots[token]
            if slot < 0:
                continue
            page = shift(a.pool, slot // a.block_size * a.block_stride)
            page = shift(page, slot % a.block_size * a.head_dim)
            for kv_head in range(a.kv_heads):
                head = a.heads + kv_head
                k = shift(page, kv_head * page_size)
                _turn(a, shift(x, head * a.head_dim), head, cos, sin, k)
                source = shift(x, (head + a.kv_heads) * a.head_dim)
                v = shift(k, a.kv_heads * page_size)
                for i in range(0, a.head_dim, LANES):
                    store(v, i, load(source, i))


@helper
def _turn(a, x, head, cos, sin, out):
    """Each feature with the one half a head away, both normalised first where there is a weight."""
    half = a.head_dim // 2
    factor = float32(1.0)
    if a.has_weight:
        factor = _inverse_root_mean_square(x, a.head_dim, a.eps)
    weight = shift(a.weight, int64(head) * a.head_dim)
    for i in range(0, half, LANES):
        low, high = load(x, i), load(x, half + i)
        if a.has_weight:
            low = low * factor * load(weight, i)
            high = high * factor * load(weight, half + i)
        store(out, i, low * load(cos, i) + high * load(sin, i))
        store(out, half + i, high * load(cos, half + i) + low * load(sin, half + i))


norm_kernel = Kernel(add_and_normalise, NormArguments)
gate_kernel = Kernel(silu_and_multiply, GateArguments)
rotate_kernel = Kernel(rotate_and_write, RotateArguments)
