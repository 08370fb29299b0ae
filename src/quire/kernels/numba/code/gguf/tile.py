"""The product of a tile of tokens with sixteen rows of weights, in registers.

Each number is summed in the same order whatever the size of the tile, and each product is fused
with its sum by intent, not by leave: so a token's results do not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.code.gguf.activations import DIGIT_BITS
from quire.kernels.numba.code.gguf.dot import (
    INT32,
    dot,
    has_feature,
    register_lanes,
    splat,
    takes_words,
    words_of,
)
from quire.kernels.numba.code.gguf.formats import FORMATS
from quire.kernels.numba.code.gguf.reader import VECTORS, constant, floats_of, steps_of
from quire.kernels.numba.code.memory import CACHE_LINE, emit_prefetch
from quire.kernels.numba.sizes import LANES, STEP

INT64 = ir.IntType(64)
AT_ONCE = 4  # tokens: an instruction need not wait for the one before it
MANY = 8  # as many as need not wait either, if their sums of both digits are one


@intrinsic(prefer_literal=True)
def multiply_tile(typing_context, kind, tokens, weights, apart, x, blocks, out):
    """`blocks` of sixteen rows with a tile of `tokens`, a constant: `out[tokens, 16]`.

    `apart` is a pointer to scales that do not lie in the blocks, how many floats there are from one
    set of them to the next, and how many blocks share one.

    `kind` is a value of no meaning, whose type has the name of the weights' type.
    """
    format_, count = FORMATS[kind.name], tokens.literal_value

    def generate(context, builder, signature, arguments):
        _, _, weights, apart, x, blocks, out = arguments
        zero = ir.Constant(floats_of(LANES), None)
        for token in range(count):
            store_vector(builder, zero, out, token * LANES)

        def fetch_share_of_next(base, part):
            share = register_lanes() * format_.block.bytes
            ahead = INT64(LANES * format_.block.bytes)
            ahead = builder.add(ahead, builder.mul(part, INT64(share)))
            for at in range(0, share, CACHE_LINE):
                emit_prefetch(builder, builder.gep(base, [builder.add(ahead, INT64(at))]))

        begin_part = fetch_share_of_next if count < AT_ONCE else None  # memory is waited for
        walk = steps_of(builder, format_, weights, apart, INT64(0), blocks, begin_part)
        for part, number, step in walk:
            record = builder.gep(x, [builder.mul(number, INT64(count * format_.token_bytes))])
            places = builder.gep(out, [builder.mul(part, INT64(step.lanes))])
            at_once = _at_once(format_)
            for token in range(0, count, at_once):
                tokens = range(token, min(token + at_once, count))
                add_step(builder, format_, step, record, tokens, count, places)
        return context.get_dummy_value()

    return types.void(kind, tokens, weights, apart, x, types.int64, out), generate


def _at_once(format_):
    """How many tokens are taken side by side. Measured on a Neoverse-N1: where there are minima,
    more of them whose digits have one sum are 3 to 7 % faster; Q8_0 is 1 % slower so."""
    return MANY if has_feature("dotprod") and format_.minima else AT_ONCE


def add_step(builder, format_, step, record, tokens, count, sums):
    """Add 32 products of some tokens, taken side by side, with each row to their `sums`."""
    floats, words = floats_of(step.lanes), words_of(step.lanes)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(floats, (floats,) * 3), f"llvm.fma.v{step.lanes}f32"
    )

    def word(kind, at):
        place = builder.bitcast(builder.gep(record, [INT64(at)]), kind.as_pointer())
        return builder.load(place, align=1)

    places = [builder.gep(sums, [INT64(token * LANES)]) for token in tokens]
    totals = [builder.load(builder.bitcast(each, floats.as_pointer()), align=4) for each in places]
    code_bytes = format_.digits * STEP
    of_sums = (code_bytes + 4) * count
    each = VECTORS // format_.scales
    parts: list[Any] = [None] * len(tokens)
    for i, row_scales in enumerate(step.scales):
        offsets = None
        if format_.offset:
            offsets = [word(INT32, of_sums + 8 * token + 4 * i) for token in tokens]
            offsets = [splat(builder, offset, words) for offset in offsets]
        half = range(i * each, (i + 1) * each)
        places_of_x = [builder.gep(record, [INT64(code_bytes * token)]) for token in tokens]
        sums_of_codes = _sums_of_codes(
            builder, words, step.codes, half, places_of_x, format_.digits, offsets
        )
        for n, found in enumerate(sums_of_codes):
            found = builder.sitofp(found, floats)
            if i:
                parts[n] = builder.call(fma, (found, row_scales, parts[n]))
            else:
                parts[n] = builder.fmul(found, row_scales)
    for n, token in enumerate(tokens):
        scale = word(ir.FloatType(), code_bytes * count + 4 * token)
        totals[n] = builder.call(fma, (parts[n], splat(builder, scale, floats), totals[n]))
        for i, minimum in enumerate(step.minima):
            of_sum = splat(builder, word(ir.FloatType(), of_sums + 8 * token + 4 * i), floats)
            totals[n] = builder.call(fma, (minimum, of_sum, totals[n]))
        store_vector(builder, totals[n], places[n], 0)


def _sums_of_codes(builder, words, codes, numbers, tokens, digits, offsets):
    """Of each token, whose activations' codes begin there, the sum of them times codes of these
    numbers, and its offset."""

    def add_products(parts):
        for j in numbers:
            code = codes[j]
            for digit, sums in parts.items():
                for n, token in enumerate(tokens):
                    x = builder.gep(token, [INT64(STEP * digit)])
                    sums[n] = dot(builder, sums[n], code, x, j)

    def joined(firsts, seconds):
        shift = constant(words, DIGIT_BITS)
        pairs = zip(firsts, seconds, strict=True)
        return [builder.add(builder.shl(first, shift), second) for first, second in pairs]

    firsts = [words(None)] * len(tokens)
    start = list(offsets or firsts)
    if takes_words() or digits == 1:
        add_products({0: start})
        return start
    if len(tokens) == MANY and has_feature("dotprod"):
        # What `sdot` adds to may be the sum of the one before it: it is passed on at once.
        add_products({0: firsts})
        sums = joined(firsts, start)
        add_products({1: sums})
        return sums
    add_products({0: firsts, 1: start})
    return joined(firsts, start)


def store_vector(builder, values, floats, at):
    place = builder.bitcast(builder.gep(floats, [INT64(at)]), values.type.as_pointer())
    builder.store(values, place, align=4)
