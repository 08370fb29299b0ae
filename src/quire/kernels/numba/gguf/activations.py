"""Activations as the products with GGUF's types take them: int8, 32 with a scale.

Tokens are in tiles, whose size is a power of two. Of each 32 activations a tile has

    codes of token 0, 1, … │ scales of token 0, 1, … │ two words of token 0, 1, …

where the words hold what the type of the weights needs of the sums of these codes: with an offset,
`-offset * sum` of each half (or of all in the first); with minima, `scale * sum` in the first.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy import float32, int32, int64

from quire.kernels.numba.gguf.formats import STEP
from quire.kernels.numba.memory import helper, shift
from quire.kernels.numba.simd import FLOATS, LANES, highest, larger, load, magnitude, splat, total

TOKEN_BYTES = STEP + 4 + 8  # of 32 activations
LARGEST_TILE = 16


@helper
def tile_size(tokens):
    """Of the tile that comes next, with this many tokens to go."""
    size = int64(LARGEST_TILE)
    while size > tokens:
        size >>= 1
    return size


@helper
def quantise_tile(x, size, tokens, tile, offset, scales, has_minimum):
    """Rows of `x`, `size` activations each, into a tile."""
    for step in range(size // STEP):
        record = shift(tile, step * tokens * TOKEN_BYTES)
        for token in range(tokens):
            row = shift(x, token * size + step * STEP)
            low, high = load(row, 0), load(row, LANES)
            largest = highest(larger(magnitude(low), magnitude(high)))
            scale, inverse = largest / float32(127.0), float32(0.0)
            if largest > float32(0.0):
                inverse = float32(127.0) / largest
            # NaN and infinity make NaN of the scale, and so of all that it multiplies.
            scale = scale + total(low + high) * float32(0.0)
            codes = shift(record, token * STEP)
            first = store_rounded(codes, low * splat(inverse))
            second = store_rounded(shift(codes, LANES), high * splat(inverse))
            store_word(record, STEP * tokens + 4 * token, scale)
            words = (STEP + 4) * tokens + 8 * token
            if has_minimum:
                store_word(record, words, scale * float32(first + second))
            elif scales == 1:
                store_word(record, words, int32(-offset * (first + second)))
            else:
                store_word(record, words, int32(-offset * first))
                store_word(record, words + 4, int32(-offset * second))


@intrinsic
def store_rounded(typing_context, codes, values):
    """Put sixteen numbers into memory as int8; returns their sum."""
    word = ir.IntType(32)
    narrow, wide = (ir.VectorType(each, LANES) for each in (ir.IntType(8), word))

    def generate(context, builder, signature, arguments):
        pointer, values = arguments
        rint, clamp, add = (
            cgutils.get_or_insert_function(builder.module, ir.FunctionType(*kind), name)
            for name, kind in (
                ("llvm.rint.v16f32", (FLOATS, (FLOATS,))),
                ("llvm.fptosi.sat.v16i8.v16f32", (narrow, (FLOATS,))),
                ("llvm.vector.reduce.add.v16i32", (word, (wide,))),
            )
        )
        rounded = builder.call(clamp, (builder.call(rint, (values,)),))
        builder.store(rounded, builder.bitcast(pointer, narrow.as_pointer()), align=1)
        return builder.sext(builder.call(add, (builder.sext(rounded, wide),)), ir.IntType(64))

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
