"""Products with weights as GGUF files have them, over all threads: with a bias, or with a gate.

First the activations become codes, each tile in pieces that threads share; when all are, they go
on to the weights. An item of work is a few groups of sixteen rows with some tiles of tokens: a
group's weights, and then the tokens' activations, are read from the nearest caches again and again.
Tiles of `AMX_TOKENS` there are only where AMX multiplies them.
"""

from __future__ import annotations

from numpy import float32, int64

from quire.kernels.numba.code.exp import exp
from quire.kernels.numba.code.gguf import amx
from quire.kernels.numba.code.gguf.activations import quantise_steps, tile_size
from quire.kernels.numba.code.gguf.tile import multiply_tile
from quire.kernels.numba.code.memory import claim, count_of, floats_on_stack, helper, shift
from quire.kernels.numba.code.simd import load, minus_magnitude, splat, store, where_negative
from quire.kernels.numba.sizes import AMX_TOKENS, LANES, STEP, TOKEN_BYTES, UNPACKED_BYTES

CHUNK = 256  # tokens: their activations stay in the second cache
PIECE = 8  # steps of a tile that a thread claims: a few microseconds
PRODUCTS = 2 * AMX_TOKENS * LANES  # of a tile with sixteen rows, and with sixteen more


def multiply(arguments):
    a = arguments[0]
    _quantise(arguments)
    both = floats_on_stack(PRODUCTS)
    matrices = 1 + a.is_gated
    unpacked_bytes = a.size // STEP * UNPACKED_BYTES
    unpacked = shift(a.unpacked, claim(arguments, 3) * matrices * unpacked_bytes)
    largest = amx.largest_tile(a.kind, a.tokens)
    amx.begin(a.kind)
    chunks = (a.tokens + CHUNK - 1) // CHUNK
    parts = (a.groups + a.groups_at_once - 1) // a.groups_at_once
    item = claim(arguments, 2)
    while item < chunks * parts:
        chunk, part = item // parts, item % parts
        end = min((chunk + 1) * CHUNK, a.tokens)
        for group in range(part * a.groups_at_once, min((part + 1) * a.groups_at_once, a.groups)):
            token = chunk * CHUNK
            if tile_size(largest, end - token) == AMX_TOKENS:
                for i in range(matrices):
                    place = shift(unpacked, i * unpacked_bytes)
                    weights, apart = _group(a, i * a.groups + group)
                    amx.unpack(a.kind, weights, apart, a.blocks, place)
            while token < end:
                tokens = tile_size(largest, end - token)
                for i in range(matrices):
                    place = shift(both, i * tokens * LANES)
                    x = shift(a.tiles, token * (a.size // STEP) * TOKEN_BYTES)
                    if tokens == AMX_TOKENS:
                        codes = shift(unpacked, i * unpacked_bytes)
                        amx.multiply_unpacked(a.kind, codes, x, a.blocks, place)
                    else:
                        _product(a, i * a.groups + group, x, tokens, place)
                if a.is_gated:
                    store_gated(a, group, token, tokens, both)
                else:
                    store_products(a, group, token, tokens, both)
                token += tokens
        item = claim(arguments, 2)
    amx.end(a.kind)


@helper
def _quantise(arguments):
    """All tiles, piece by piece; returns when those of other threads are done, too."""
    a = arguments[0]
    steps = a.size // STEP
    pieces_of_tile = (steps + PIECE - 1) // PIECE
    largest = amx.largest_tile(a.kind, a.tokens)
    pieces = int64(0)  # of the tiles before
    token = int64(0)
    claimed = claim(arguments, 0)
    while token < a.tokens:
        tokens = tile_size(largest, a.tokens - token)
        while claimed < pieces + pieces_of_tile:
            step = (claimed - pieces) * PIECE
            tile = shift(a.tiles, token * steps * TOKEN_BYTES)
            quantise_steps(a.kind, a.x, a.size, token, tokens, tile, step, min(step + PIECE, steps))
            claim(arguments, 1)
            claimed = claim(arguments, 0)
        pieces += pieces_of_tile
        token += tokens
    while count_of(arguments, 1) < pieces:
        pass


@helper
def _group(a, group):
    """Where its weights are, and its scales, if they lie apart."""
    weights = shift(a.weights, group * a.group_bytes)
    scales = shift(a.scales_apart, group * a.group_scales)
    return weights, (scales, a.scale_stride, a.blocks_of_scale)


@helper
def _product(a, group, x, tokens, out):
    weights, apart = _group(a, group)
    if tokens == 8:
        multiply_tile(a.kind, 8, weights, apart, x, a.blocks, out)
    elif tokens == 4:
        multiply_tile(a.kind, 4, weights, apart, x, a.blocks, out)
    elif tokens == 2:
        multiply_tile(a.kind, 2, weights, apart, x, a.blocks, out)
    else:
        multiply_tile(a.kind, 1, weights, apart, x, a.blocks, out)


@helper
def store_products(a, group, token, tokens, products):
    row = group * LANES
    for i in range(tokens):
        numbers = load(products, i * LANES)
        if a.has_bias:
            numbers = numbers + load(a.bias, row)
        store(a.out, (token + i) * a.width + row, numbers)


@helper
def store_gated(a, group, token, tokens, both):
    one = splat(float32(1.0))
    row = group * LANES
    for i in range(tokens):
        x, up = load(both, i * LANES), load(both, (tokens + i) * LANES)
        if a.has_bias:
            x, up = x + load(a.bias, row), up + load(a.bias, a.groups * LANES + row)
        power = exp(minus_magnitude(x))  # at most 1: nothing overflows
        sigmoid = where_negative(x, power, one) / (one + power)
        store(a.out, (token + i) * a.width + row, x * sigmoid * up)
