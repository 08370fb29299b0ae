"""Both small products of adapters, of all rows and all slots of a step: `out += b (a x) + bias`.

Threads claim ranks of a tile of rows that use the same slot, and leave `a x` in `hidden`; when all
of that is there, they claim features of a tile. A tile whose slot has nothing for this matrix is no
work. Sums go over columns, and over ranks, in one order, whatever other rows there are.
"""

from __future__ import annotations

from numpy import float32, int64

from quire.kernels.numba.code.memory import claim, count_of, helper, prefetch, shift
from quire.kernels.numba.code.simd import load, rounded_as, splat, store, total
from quire.kernels.numba.sizes import LANES

RANKS = 8  # claimed at a time
FEATURES = 256  # the same
AHEAD = 4 * LANES  # numbers: rows of `b` are too far apart for a CPU to guess the next ones


def add(arguments):
    _shrink(arguments)
    _expand(arguments)


@helper
def _shrink(arguments):
    """`a x` of all tiles; returns when what other threads claimed is done, too."""
    a = arguments[0]
    items = int64(0)
    claimed = claim(arguments, 0)
    for tile in range(a.num_tiles):
        ranks = _start_of_output(a, tile, a.outputs)
        first = items
        items += (ranks + RANKS - 1) // RANKS
        while claimed < items:
            rank = (claimed - first) * RANKS
            _shrink_tile(a, tile, rank, min(rank + RANKS, ranks))
            claim(arguments, 1)
            claimed = claim(arguments, 0)
    while count_of(arguments, 1) < items:
        pass


@helper
def _expand(arguments):
    """Add `b` times that, output by output."""
    a = arguments[0]
    items = int64(0)
    claimed = claim(arguments, 2)
    for tile in range(a.num_tiles):
        first = items
        if _start_of_output(a, tile, a.outputs) or _is_biased(a, tile):
            items += (a.features + FEATURES - 1) // FEATURES
        while claimed < items:
            feature = (claimed - first) * FEATURES
            end = min(feature + FEATURES, a.features)
            for output in range(a.outputs):
                begin, last = a.columns[output], a.columns[output + 1]
                _expand_tile(a, tile, output, max(feature, begin), min(end, last))
            claimed = claim(arguments, 2)


@helper
def _start_of_output(a, tile, output):
    """The first of its rows of `a`; of the output behind the last, how many there are."""
    slot = a.tiles[tile]
    if slot < 0:
        return int64(0)
    return int64(a.starts[slot // a.experts * a.starts_stride + output])


@helper
def _is_biased(a, tile):
    slot = a.tiles[tile]
    return slot >= 0 and a.is_biased[slot // a.experts * a.biased_stride] != 0


@helper
def _shrink_tile(a, tile, rank, end):
    matrix = shift(a.a, int64(a.tiles[tile]) * a.ranks * a.inputs)
    last = a.tiles[2 * a.num_tiles + tile]
    while rank < end:
        other = min(rank + 1, end - 1)  # the same again behind an even number
        w, v = shift(matrix, rank * a.inputs), shift(matrix, other * a.inputs)
        place = int64(a.tiles[a.num_tiles + tile])
        while place < last:
            hidden = shift(a.hidden, place * a.ranks)
            x = shift(a.x, a.order[place] * a.x_stride)
            if place + 1 < last:
                y = shift(a.x, a.order[place + 1] * a.x_stride)
                wx, vx, wy, vy = _dots_of_two(w, v, x, y, a.inputs)
                hidden[a.ranks + rank] = rounded_as(a.x, wy)
                hidden[a.ranks + other] = rounded_as(a.x, vy)
            else:
                wx, vx = _dots_of_one(w, v, x, a.inputs)
            hidden[rank] = rounded_as(a.x, wx)
            hidden[other] = rounded_as(a.x, vx)
            place += 2
        rank += 2


@helper
def _dots_of_two(w, v, x, y, size):
    wx = vx = wy = vy = splat(float32(0.0))
    for i in range(0, size, LANES):
        ours, others = load(w, i), load(v, i)
        first, second = load(x, i), load(y, i)
        wx = wx + ours * first
        vx = vx + others * first
        wy = wy + ours * second
        vy = vy + others * second
    return total(wx), total(vx), total(wy), total(vy)


@helper
def _dots_of_one(w, v, x, size):
    wx = vx = splat(float32(0.0))
    for i in range(0, size, LANES):
        numbers = load(x, i)
        wx = wx + load(w, i) * numbers
        vx = vx + load(v, i) * numbers
    return total(wx), total(vx)


@helper
def _expand_tile(a, tile, output, feature, end):
    start = _start_of_output(a, tile, output)
    ranks = _start_of_output(a, tile, output + 1) - start
    is_biased = _is_biased(a, tile)
    if ranks == 0 and not is_biased:
        return
    slot, last = int64(a.tiles[tile]), a.tiles[2 * a.num_tiles + tile]
    b = shift(a.b, slot * a.most_rank * a.features)
    bias = shift(a.bias, slot * a.features)
    place = int64(a.tiles[a.num_tiles + tile])
    while place < last:
        hidden = shift(a.hidden, place * a.ranks + start)
        out = shift(a.out, a.order[place] * a.out_stride)
        other = shift(a.out, a.order[min(place + 1, last - 1)] * a.out_stride)
        for i in range(feature, end, LANES):
            first = splat(float32(0.0))
            if is_biased:
                first = load(bias, i)
            if place + 1 < last:
                sums, others = _sums_of_two(hidden, shift(b, i), first, ranks, a)
                store(other, i, load(other, i) + others)
            else:
                sums = _sums_of_one(hidden, shift(b, i), first, ranks, a)
            store(out, i, load(out, i) + sums)
        place += 2


@helper
def _sums_of_two(hidden, b, sums, ranks, a):
    other_hidden, others = shift(hidden, a.ranks), sums
    for rank in range(ranks):
        numbers = load(b, rank * a.features)
        prefetch(b, rank * a.features + AHEAD)
        sums = sums + numbers * hidden[rank]
        others = others + numbers * other_hidden[rank]
    return sums, others


@helper
def _sums_of_one(hidden, b, sums, ranks, a):
    for rank in range(ranks):
        prefetch(b, rank * a.features + AHEAD)
        sums = sums + load(b, rank * a.features) * hidden[rank]
    return sums
