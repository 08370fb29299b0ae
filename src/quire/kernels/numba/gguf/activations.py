"""Activations as the products with GGUF's types take them: int8, 32 with a scale.

Tokens are in tiles, whose size is a power of two. Of each 32 activations a tile has

    codes of token 0, 1, … │ scales of token 0, 1, … │ two words of token 0, 1, …

where the words hold what the type of the weights needs of the sums of these codes: with an offset,
`-offset * sum` of each half (or of all in the first); with minima, `scale * sum` in the first.

Where int8 is too coarse an activation has two digits: the second is what the first left over, with
a scale of its own. A token is then two rows of a tile, whose products are added in the end.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy import float32, int32, int64

from quire.kernels.numba.gguf.formats import STEP
from quire.kernels.numba.memory import helper, shift
from quire.kernels.numba.simd import (
    FLOATS,
    LANES,
    highest,
    larger,
    load,
    magnitude,
    round_lanes,
    rounded,
    total,
)

TOKEN_BYTES = STEP + 4 + 8  # of 32 activations
LARGEST_TILE = 8


@helper
def tile_size(rows):
    """Of the tile that comes next, with this many rows to go."""
    size = int64(LARGEST_TILE)
    while size > rows:
        size >>= 1
    return size


@helper
def quantise_tile(x, size, first, rows, digits, tile, offset, scales, has_minimum):
    """Activations `x` `[tokens, size]` into a tile of rows, which begins with row `first`."""
    for step in range(size // STEP):
        record = shift(tile, step * rows * TOKEN_BYTES)
        for row in range(rows):
            token = (first + row) // digits
            place = shift(x, token * size + step * STEP)
            low, high = load(place, 0), load(place, LANES)
            # NaN and infinity make NaN of the scale, and so of all that it multiplies.
            poison = total(low + high) * float32(0.0)
            scale, inverse = _scale(low, high)
            if (first + row) % digits:
                low = low - rounded(low * inverse) * scale
                high = high - rounded(high * inverse) * scale
                scale, inverse = _scale(low, high)
            scale = scale + poison
            codes = shift(record, row * STEP)
            left = store_rounded(codes, low * inverse)
            right = store_rounded(shift(codes, LANES), high * inverse)
            store_word(record, STEP * rows + 4 * row, scale)
            words = (STEP + 4) * rows + 8 * row
            if has_minimum:
                store_word(record, words, scale * float32(left + right))
            elif scales == 1:
                store_word(record, words, int32(-offset * (left + right)))
            else:
                store_word(record, words, int32(-offset * left))
                store_word(record, words + 4, int32(-offset * right))


@helper
def _scale(low, high):
    """That of 32 numbers, and what makes codes of them."""
    largest = highest(larger(magnitude(low), magnitude(high)))
    inverse = float32(0.0)
    if largest > float32(0.0):
        inverse = float32(127.0) / largest
    return largest / float32(127.0), inverse


@intrinsic
def store_rounded(typing_context, codes, values):
    """Put sixteen numbers into memory as int8; returns their sum."""
    word = ir.IntType(32)
    narrow, wide = (ir.VectorType(each, LANES) for each in (ir.IntType(8), word))

    def generate(context, builder, signature, arguments):
        pointer, values = arguments
        clamp, add = (
            cgutils.get_or_insert_function(builder.module, ir.FunctionType(*kind), name)
            for name, kind in (
                ("llvm.fptosi.sat.v16i8.v16f32", (narrow, (FLOATS,))),
                ("llvm.vector.reduce.add.v16i32", (word, (wide,))),
            )
        )
        codes = builder.call(clamp, (round_lanes(builder, values),))
        builder.store(codes, builder.bitcast(pointer, narrow.as_pointer()), align=1)
        return builder.sext(builder.call(add, (builder.sext(codes, wide),)), ir.IntType(64))

    return types.int64(codes, values), generate


@intrinsic
def store_word(typing_context, memory, at, number):
    """Put an int32 or a float32 at byte `at`."""

    def generate(context, builder, signature, arguments):
        pointer, at, number = arguments
        place = builder.bitcast(builder.gep(pointer, [at]), number.type.as_pointer())
        builder.store(number, place, align=1)
        return context.get_dummy_value()

    return types.void(memory, types.int64, number), generate
