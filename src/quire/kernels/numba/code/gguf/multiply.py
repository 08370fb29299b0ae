"""Products with weights as GGUF files have them, over all threads: with a bias, or with a gate.

First the activations become codes, each tile in pieces that threads share; when all are, they go
on to the weights. An item of work is a few groups of sixteen rows with some tiles of tokens: a
group's weights, and then the tokens' activations, are read from the nearest caches again and again.
For many tokens weights are unpacked first, a few steps at a time (`unpacked.py`).
"""

from __future__ import annotations

from numpy import float32, int64

from quire.kernels.numba.code.exp import exp
from quire.kernels.numba.code.gguf.activations import quantise_steps, tile_size, token_bytes_of
from quire.kernels.numba.code.gguf.dot import unpacks
from quire.kernels.numba.code.gguf.tile import multiply_tile
from quire.kernels.numba.code.gguf.unpacked import (
    FETCHING,
    UNPACKED_FLOATS,
    bytes_of_share,
    multiply_unpacked,
    unpack,
)
from quire.kernels.numba.code.memory import claim, count_of, floats_on_stack, helper, shift
from quire.kernels.numba.code.simd import (
    load,
    minus_magnitude,
    splat,
    store,
    store_past_caches,
    where_negative,
)
from quire.kernels.numba.sizes import LANES, STEP, TILE

MOST_TOKENS = 256  # of a chunk
# Bytes of its activations, which stay in the second cache: what other threads have made of them
# comes from memory again where it does not. With 640 KiB two threads were a tenth slower.
SECOND_CACHE = 160 << 10
PIECE = 8  # steps of a tile that a thread claims: a few microseconds
PRODUCTS = 2 * TILE * LANES  # of a tile with sixteen rows, and with sixteen more
PRODUCTS_OF_CHUNK = PRODUCTS * MOST_TOKENS // TILE
UNPACKS = unpacks()
UNPACKED_STEPS = 8  # at a time, which stay in the first cache: as many as any block has
UNPACKED = UNPACKED_STEPS * UNPACKED_FLOATS


def multiply(arguments):
    a = arguments[0]
    _quantise(arguments)
    size = _chunk_size(a)
    chunks = (a.tokens + size - 1) // size
    parts = (a.groups + a.groups_at_once - 1) // a.groups_at_once
    while True:
        item = claim(arguments, 2)
        if item >= chunks * parts:
            return
        chunk, part = item // parts, item % parts
        end = min((chunk + 1) * size, a.tokens)
        for group in range(part * a.groups_at_once, min((part + 1) * a.groups_at_once, a.groups)):
            _multiply_group(a, group, chunk * size, end)


@helper
def _chunk_size(a):
    """How many tokens are multiplied with all weights before the next: whole tiles."""
    if not UNPACKS:  # without, fewer have not been measured
        return int64(MOST_TOKENS)
    fit = SECOND_CACHE // (a.size // STEP * token_bytes_of(a.kind))
    return min(max(fit, FETCHING * TILE), MOST_TOKENS) // TILE * TILE


@helper
def _multiply_group(a, group, token, end):
    """Tokens with sixteen rows, and with those that these gate."""
    products = floats_on_stack(PRODUCTS_OF_CHUNK)
    if UNPACKS and tile_size(end - token) == TILE:
        tiles = (end - token + 1) // TILE
        if a.is_gated:
            _multiply_tiles(a, group, False, token, end, tiles, products)
        _multiply_tiles(a, group, True, token, end, tiles, products)
        token += tiles * TILE
    while token < end:
        tokens = tile_size(end - token)
        for i in range(1 + a.is_gated):
            place = shift(products, i * tokens * LANES)
            _product(a, i * a.groups + group, token, tokens, place)
        _store(a, group, token, end, tokens, products)
        token += tokens


@helper
def _multiply_tiles(a, group, is_last, token, end, tiles, products):
    """The largest tiles with sixteen rows, or first with those that gate these: a few steps of all
    tiles at a time. What is done is stored, so that memory is not waited for."""
    unpacked = floats_on_stack(UNPACKED)
    of_tile = (1 + a.is_gated) * TILE * LANES
    sums = shift(products, TILE * LANES if is_last and a.is_gated else 0)
    for tile in range(tiles):
        for i in range(TILE):
            store(sums, tile * of_tile + i * LANES, splat(float32(0.0)))
    weights, apart = _group(a, a.groups + group if is_last and a.is_gated else group)
    steps = a.size // STEP
    block_steps = steps // a.blocks
    block_bytes = a.group_bytes // a.blocks
    for first in range(0, a.blocks, UNPACKED_STEPS // block_steps):
        last = min(first + UNPACKED_STEPS // block_steps, a.blocks)
        unpack(a.kind, weights, apart, first, last, unpacked)
        count = (last - first) * block_steps
        next_weights = shift(weights, last * block_bytes)
        own_bytes = bytes_of_share(a.kind, count) if tiles >= FETCHING else 0
        for tile in range(tiles):
            record = (token + tile * TILE) * steps + first * block_steps * TILE
            x, out = shift(a.tiles, record * token_bytes_of(a.kind)), shift(sums, tile * of_tile)
            fetched = shift(next_weights, tile % FETCHING * own_bytes)
            is_all = own_bytes == 0 and tile == 0
            multiply_unpacked(a.kind, unpacked, x, count, fetched, is_all, out)
            if is_last and last == a.blocks:
                place = shift(products, tile * of_tile)
                _store(a, group, token + tile * TILE, end, TILE, place)


@helper
def _quantise(arguments):
    """All tiles, piece by piece; returns when those of other threads are done, too."""
    a = arguments[0]
    steps = a.size // STEP
    pieces_of_tile = (steps + PIECE - 1) // PIECE
    pieces = int64(0)  # of the tiles before
    token = int64(0)
    claimed = claim(arguments, 0)
    while token < a.tokens:
        tokens = tile_size(a.tokens - token)
        while claimed < pieces + pieces_of_tile:
            step = (claimed - pieces) * PIECE
            tile = shift(a.tiles, token * steps * token_bytes_of(a.kind))
            end = min(step + PIECE, steps)
            quantise_steps(a.kind, a.x, a.size, token, a.tokens - 1, tokens, tile, step, end)
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
def _product(a, group, token, tokens, out):
    weights, apart = _group(a, group)
    x = shift(a.tiles, token * (a.size // STEP) * token_bytes_of(a.kind))
    if not UNPACKS and tokens == 8:
        multiply_tile(a.kind, 8, weights, apart, x, a.blocks, out)
    elif tokens == 4:
        multiply_tile(a.kind, 4, weights, apart, x, a.blocks, out)
    elif tokens == 2:
        multiply_tile(a.kind, 2, weights, apart, x, a.blocks, out)
    else:
        multiply_tile(a.kind, 1, weights, apart, x, a.blocks, out)


@helper
def _store(a, group, token, end, tokens, products):
    """Of a tile, what is of tokens before `end`."""
    count = min(tokens, end - token)
    if a.is_gated:
        store_gated(a, group, token, count, products, shift(products, tokens * LANES))
    else:
        store_products(a, group, token, count, products)


@helper
def store_products(a, group, token, tokens, products):
    row = group * LANES
    for i in range(tokens):
        numbers = load(products, i * LANES)
        if a.has_bias:
            numbers = numbers + load(a.bias, row)
        _put(a, (token + i) * a.width + row, numbers)


@helper
def store_gated(a, group, token, tokens, gates, ups):
    one = splat(float32(1.0))
    row = group * LANES
    for i in range(tokens):
        x, up = load(gates, i * LANES), load(ups, i * LANES)
        if a.has_bias:
            x, up = x + load(a.bias, row), up + load(a.bias, a.groups * LANES + row)
        power = exp(minus_magnitude(x))  # at most 1: nothing overflows
        sigmoid = where_negative(x, power, one) / (one + power)
        _put(a, (token + i) * a.width + row, x * sigmoid * up)


@helper
def _put(a, place, numbers):
    if a.is_large:
        store_past_caches(a.out, place, numbers)
    else:
        store(a.out, place, numbers)
