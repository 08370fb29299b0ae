"""Activations as the products with GGUF's types take them: 32 codes of 16 bits with a scale.

A code is two digits of eight bits, `256 * first + second`, both with a sign: there are instructions
for products of bytes. One digit alone is for who asks for it (`activation_bits=8`). Where there are
no such instructions, but some for pairs of 16 bits, codes stay whole: of each four the first and
the third, then the second and the fourth. Tokens are in tiles, whose size is a power of two. Of
each 32 activations a tile has

    first digits, second digits of token 0, 1, … │ scales of token 0, 1, … │ two words of token 0, …

where the words hold what the type of the weights needs of the sums of these codes: with an offset,
`-offset * sum` of each half (or of all in the first); with minima, `scale * sum` likewise.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy import float32, int32, int64

from quire.kernels.numba.code.gguf.dot import INT8, INT16, takes_words
from quire.kernels.numba.code.gguf.formats import FORMATS
from quire.kernels.numba.code.memory import helper, shift
from quire.kernels.numba.code.simd import (
    FLOATS,
    WORDS,
    highest,
    larger,
    load,
    magnitude,
    round_lanes,
    total,
)
from quire.kernels.numba.sizes import DIGITS, LANES, STEP, TILE

DIGIT_BITS = 8


@helper
def tile_size(rows):
    """Of the tile that comes next, with this many rows to go. The last of three or seven is taken
    twice: that takes less time than tiles of two sizes or three."""
    size = int64(TILE)
    while size > rows + (rows > 2):
        size >>= 1
    return size


@helper
def quantise_steps(kind, x, size, first, last, tokens, tile, begin, end):
    """Some steps of activations `x`, `[last + 1, size]`, into a tile that begins with `first`."""
    offset, scales, minima = offset_of(kind), scales_of(kind), minima_of(kind)
    code_bytes = digits_of(kind) * STEP
    for step in range(begin, end):
        record = shift(tile, step * tokens * token_bytes_of(kind))
        for token in range(tokens):
            place = shift(x, min(first + token, last) * size + step * STEP)
            low, high = load(place, 0), load(place, LANES)
            # NaN and infinity make NaN of the scale, and so of all that it multiplies.
            poison = total(low + high) * float32(0.0)
            scale, inverse = _scale(low, high, float32(largest_code(kind)))
            scale = scale + poison
            codes = shift(record, token * code_bytes)
            left = store_codes(kind, codes, 0, low * inverse)
            right = store_codes(kind, codes, 1, high * inverse)
            store_word(record, code_bytes * tokens + 4 * token, scale)
            words = (code_bytes + 4) * tokens + 8 * token
            if minima == 2:
                store_word(record, words, scale * float32(left))
                store_word(record, words + 4, scale * float32(right))
            elif minima == 1:
                store_word(record, words, scale * float32(left + right))
            elif scales == 1:
                store_word(record, words, int32(-offset * (left + right)))
            else:
                store_word(record, words, int32(-offset * left))
                store_word(record, words + 4, int32(-offset * right))


def _constant_of(name):
    """An intrinsic for what the weights' type needs, or what its activations are."""

    @intrinsic
    def constant(typing_context, kind):
        number = getattr(FORMATS[kind.name], name)

        def generate(context, builder, signature, arguments):
            return context.get_constant(types.int64, number)

        return types.int64(kind), generate

    return constant


offset_of = _constant_of("offset")
scales_of, minima_of = _constant_of("scales"), _constant_of("minima")  # of a step: how many
digits_of = _constant_of("digits")
token_bytes_of = _constant_of("token_bytes")
largest_code = _constant_of("largest_code")


@helper
def _scale(low, high, most):
    """That of 32 numbers, and what makes codes of them."""
    largest = highest(larger(magnitude(low), magnitude(high)))
    inverse = float32(0.0)
    if largest > float32(0.0):
        inverse = most / largest
    return largest / most, inverse


@intrinsic(prefer_literal=True)
def store_codes(typing_context, kind, memory, half, values):
    """Put sixteen numbers into memory as the first or the second half of a token's 32 codes;
    returns the codes' sum."""
    at = half.literal_value * LANES
    format_ = FORMATS[kind.name]

    def generate(context, builder, signature, arguments):
        _, pointer, _, values = arguments
        add = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(WORDS.element, (WORDS,)),
            "llvm.vector.reduce.add.v16i32",
        )
        rounded = _within(builder, round_lanes(builder, values), format_.largest_code)
        codes = builder.fptosi(rounded, WORDS)
        if takes_words():
            order = WORDS([i // 4 * 4 + (0, 2, 1, 3)[i % 4] for i in range(LANES)])
            pairs = builder.shuffle_vector(codes, WORDS(ir.Undefined), order)
            _store_narrow(builder, pairs, INT16, pointer, DIGITS * at)
        else:
            digits = [codes] if format_.digits == 1 else _two_digits(builder, codes)
            for i, digit in enumerate(digits):
                _store_narrow(builder, digit, INT8, pointer, i * STEP + at)
        return builder.sext(builder.call(add, (codes,)), ir.IntType(64))

    return types.int64(kind, memory, half, values), generate


def _within(builder, values, largest):
    """NaN is 0, and infinity the largest code: the scale says that they are there. LLVM has one
    operation for it, of which it makes sixteen on x86."""
    is_number = builder.fcmp_ordered("ord", values, values)
    values = builder.select(is_number, values, FLOATS(None))
    most, least = (FLOATS([sign * float(largest)] * LANES) for sign in (1, -1))
    values = builder.select(builder.fcmp_ordered("olt", values, most), values, most)
    return builder.select(builder.fcmp_ordered("ogt", values, least), values, least)


def _two_digits(builder, codes):
    half, bits = (
        ir.Constant(WORDS, [number] * LANES) for number in (1 << DIGIT_BITS - 1, DIGIT_BITS)
    )
    first = builder.ashr(builder.add(codes, half), bits)  # so that the second has a sign
    return first, builder.sub(codes, builder.shl(first, bits))


def _store_narrow(builder, numbers, kind, pointer, at):
    narrow = ir.VectorType(kind, LANES)
    place = builder.gep(pointer, [ir.IntType(64)(at)])
    place = builder.bitcast(place, narrow.as_pointer())
    builder.store(builder.trunc(numbers, narrow), place, align=1)


@intrinsic
def store_word(typing_context, memory, at, number):
    """Put an int32 or a float32 at byte `at`."""

    def generate(context, builder, signature, arguments):
        pointer, at, number = arguments
        place = builder.bitcast(builder.gep(pointer, [at]), number.type.as_pointer())
        builder.store(number, place, align=1)
        return context.get_dummy_value()

    return types.void(memory, types.int64, number), generate
