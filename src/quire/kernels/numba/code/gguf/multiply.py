"""Products with weights as GGUF files have them, over all threads: with a bias, or with a gate.

First the activations become codes, tile by tile; when all are, the threads go on to the
weights. An item of work is a few groups of sixteen rows with some tiles of tokens: a group's
weights, and then the tokens' activations, are read from the nearest caches again and again.
"""

from __future__ import annotations

from numpy import float32, int64

from quire.kernels.numba.code.exp import exp
from quire.kernels.numba.code.gguf.activations import LARGEST_TILE, quantise_tile, tile_size
from quire.kernels.numba.code.gguf.tile import multiply_tile
from quire.kernels.numba.code.memory import claim, count_of, floats_on_stack, helper, shift
from quire.kernels.numba.code.simd import load, minus_magnitude, splat, store, where_negative
from quire.kernels.numba.sizes import LANES, STEP, TOKEN_BYTES

CHUNK = 256  # tokens: their activations stay in the second cache
PRODUCTS = 2 * LARGEST_TILE * LANES  # of a tile with sixteen rows, and with sixteen more


def multiply(arguments):
    a = arguments[0]
    _quantise(arguments)
    both = floats_on_stack(PRODUCTS)
    chunks = (a.tokens + CHUNK - 1) // CHUNK
    parts = (a.groups + a.groups_at_once - 1) // a.groups_at_once
    while True:
        item = claim(arguments, 2)
        if item >= chunks * parts:
            return
        chunk, part = item // parts, item % parts
        end = min((chunk + 1) * CHUNK, a.tokens)
        for group in range(part * a.groups_at_once, min((part + 1) * a.groups_at_once, a.groups)):
            token = chunk * CHUNK
            while token < end:
                tokens = tile_size(end - token)
                for i in range(1 + a.is_gated):
                    place = shift(both, i * tokens * LANES)
                    _product(a, i * a.groups + group, token, tokens, place)
                if a.is_gated:
                    _store_gated(a, group, token, tokens, both)
                else:
                    _store(a, group, token, tokens, both)
                token += tokens


@helper
def _quantise(arguments):
    """All tiles; returns when those of other threads are done, too."""
    a = arguments[0]
    tiles = int64(0)
    token = int64(0)
    claimed = claim(arguments, 0)
    while token < a.tokens:
        tokens = tile_size(a.tokens - token)
        if tiles == claimed:
            tile = shift(a.tiles, token * (a.size // STEP) * TOKEN_BYTES)
            quantise_tile(a.kind, a.x, a.size, token, tokens, tile)
            claim(arguments, 1)
            claimed = claim(arguments, 0)
        tiles += 1
        token += tokens
    while count_of(arguments, 1) < tiles:
        pass


@helper
def _product(a, group, token, tokens, out):
    weights = shift(a.weights, group * a.group_bytes)
    apart = shift(a.scales_apart, group * a.group_scales), a.scale_stride, a.blocks_of_scale
    x = shift(a.tiles, token * (a.size // STEP) * TOKEN_BYTES)
    if tokens == 8:
        multiply_tile(a.kind, 8, weights, apart, x, a.blocks, out)
    elif tokens == 4:
        multiply_tile(a.kind, 4, weights, apart, x, a.blocks, out)
    elif tokens == 2:
        multiply_tile(a.kind, 2, weights, apart, x, a.blocks, out)
    else:
        multiply_tile(a.kind, 1, weights, apart, x, a.blocks, out)


@helper
def _store(a, group, token, tokens, products):
    row = group * LANES
    for i in range(tokens):
        numbers = load(products, i * LANES)
        if a.has_bias:
            numbers = numbers + load(a.bias, row)
        store(a.out, (token + i) * a.width + row, numbers)


@helper
def _store_gated(a, group, token, tokens, both):
    one = splat(float32(1.0))
    row = group * LANES
    for i in range(tokens):
        x, up = load(both, i * LANES), load(both, (tokens + i) * LANES)
        if a.has_bias:
            x, up = x + load(a.bias, row), up + load(a.bias, a.groups * LANES + row)
        power = exp(minus_magnitude(x))  # at most 1: nothing overflows
        sigmoid = where_negative(x, power, one) / (one + power)
        store(a.out, (token + i) * a.width + row, x * sigmoid * up)
