"""Products with weights of 16 bits, sixteen rows interleaved, over all threads.

With few tokens weights are widened in registers. With more some columns of sixteen rows are widened
into the nearest cache first, for all tokens of an item of work.
"""

from __future__ import annotations

from numpy import float32

from quire.kernels.numba.code.gguf.multiply import store_gated, store_products
from quire.kernels.numba.code.half_tile import COLUMNS, add_tile, widened
from quire.kernels.numba.code.memory import claim, floats_on_stack, helper, shift
from quire.kernels.numba.code.simd import splat, store
from quire.kernels.numba.sizes import LANES

CHUNK = 64  # tokens
MANY = 16  # tokens, for which it is worth to widen weights once
BLOCKS = 32  # widened at a time
SUMS = 2 * CHUNK * LANES  # of an item with sixteen rows, and with sixteen more
PANEL = BLOCKS * COLUMNS * LANES


def multiply(arguments):
    a = arguments[0]
    sums, panel = floats_on_stack(SUMS), floats_on_stack(PANEL)
    chunks = (a.tokens + CHUNK - 1) // CHUNK
    parts = (a.groups + a.groups_at_once - 1) // a.groups_at_once
    while True:
        item = claim(arguments, 2)
        if item >= chunks * parts:
            return
        first, part = item // parts * CHUNK, item % parts
        tokens = min(CHUNK, a.tokens - first)
        for group in range(part * a.groups_at_once, min((part + 1) * a.groups_at_once, a.groups)):
            for i in range(0, (1 + a.is_gated) * tokens * LANES, LANES):
                store(sums, i, splat(float32(0.0)))
            for i in range(1 + a.is_gated):
                weights = shift(a.weights, (i * a.groups + group) * a.group_bytes)
                _add_products(a, weights, first, tokens, panel, shift(sums, i * tokens * LANES))
            if a.is_gated:
                store_gated(a, group, first, tokens, sums, shift(sums, tokens * LANES))
            else:
                store_products(a, group, first, tokens, sums)


@helper
def _add_products(a, weights, first, tokens, panel, sums):
    x = shift(a.x, first * a.size)
    if tokens < MANY:
        _add_tiles(a.kind, weights, x, a.size, tokens, a.blocks, sums)
        return
    for block in range(0, a.blocks, BLOCKS):
        blocks = min(BLOCKS, a.blocks - block)
        columns = shift(weights, 2 * LANES * COLUMNS * block)
        for column in range(blocks * COLUMNS):
            widened(a.kind, columns, column, panel)
        _add_tiles(a.kind, panel, shift(x, block * COLUMNS), a.size, tokens, blocks, sums)


@helper
def _add_tiles(kind, weights, x, size, tokens, blocks, sums):
    token = 0
    while token < tokens:
        rows, own = shift(x, token * size), shift(sums, token * LANES)
        left = tokens - token
        if left >= 8:
            add_tile(kind, 8, weights, rows, size, blocks, own)
            token += 8
        elif left >= 4:
            add_tile(kind, 4, weights, rows, size, blocks, own)
            token += 4
        elif left >= 2:
            add_tile(kind, 2, weights, rows, size, blocks, own)
            token += 2
        else:
            add_tile(kind, 1, weights, rows, size, blocks, own)
            token += 1
