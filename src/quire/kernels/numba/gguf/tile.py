"""The product of a tile of tokens with sixteen rows of weights, in registers.

Each number is summed in the same order whatever the size of the tile, and each product is fused
with its sum by intent, not by leave: so a token's results do not depend on its neighbours.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.gguf.activations import DIGIT_BITS, DIGITS, TOKEN_BYTES
from quire.kernels.numba.gguf.dot import INT32, dot, register_lanes, splat, words_of
from quire.kernels.numba.gguf.formats import FORMATS, STEP, VECTORS, Reader, floats_of
from quire.kernels.numba.simd import LANES

INT64 = ir.IntType(64)


@intrinsic(prefer_literal=True)
def multiply_tile(typing_context, kind, tokens, weights, x, blocks, out):
    """`blocks` of sixteen rows with a tile of `tokens`, a constant: `out[tokens, 16]`.

    `kind` is a value of no meaning, whose type has the name of the weights' type.
    """
    format_, count = FORMATS[kind.name], tokens.literal_value

    def generate(context, builder, signature, arguments):
        _, _, weights, x, blocks, out = arguments
        lanes = register_lanes()
        block_bytes = INT64(LANES * format_.block.bytes)
        chunk_steps = format_.block.values // STEP // format_.chunks
        zero = ir.Constant(floats_of(LANES), None)
        for token in range(count):
            _store(builder, zero, out, token * LANES)
        with (
            cgutils.for_range(builder, blocks) as loop,
            cgutils.for_range(builder, INT64(LANES // lanes)) as parts,
        ):
            base = builder.gep(weights, [builder.mul(loop.index, block_bytes)])
            reader = Reader(builder, base, lanes, parts.index)
            prepared = format_.prepare(reader)
            first = builder.mul(loop.index, INT64(format_.chunks))
            places = builder.gep(out, [builder.mul(parts.index, INT64(lanes))])
            with cgutils.for_range(builder, INT64(format_.chunks)) as chunks:
                chunk = builder.add(first, chunks.index)
                record_bytes = count * TOKEN_BYTES
                start = builder.mul(chunk, INT64(chunk_steps * record_bytes))
                for i, step in enumerate(format_.steps(reader, prepared, chunks.index)):
                    at = builder.add(start, INT64(i * record_bytes))
                    record = builder.gep(x, [at])
                    for token in range(count):
                        place = builder.gep(places, [INT64(token * LANES)])
                        _add_step(builder, format_, step, record, token, count, place)
        return context.get_dummy_value()

    return types.void(kind, tokens, weights, x, types.int64, out), generate


def _add_step(builder, format_, step, record, token, count, place):
    """Add 32 products of one token with each row to the sums at `place`."""
    floats, words = floats_of(step.lanes), words_of(step.lanes)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(floats, (floats,) * 3), f"llvm.fma.v{step.lanes}f32"
    )

    def word(kind, at):
        place = builder.bitcast(builder.gep(record, [INT64(at)]), kind.as_pointer())
        return builder.load(place, align=1)

    scale = splat(builder, word(ir.FloatType(), DIGITS * STEP * count + 4 * token), floats)
    of_sums = (DIGITS * STEP + 4) * count + 8 * token
    total = builder.load(builder.bitcast(place, floats.as_pointer()), align=4)
    each = VECTORS // format_.scales
    for i, row_scales in enumerate(step.scales):
        found = words(None)
        for digit in range(DIGITS):
            if digit:
                found = builder.shl(found, splat(builder, INT32(DIGIT_BITS), words))
            x = builder.gep(record, [INT64(STEP * (DIGITS * token + digit))])
            for j in range(i * each, (i + 1) * each):
                found = dot(builder, found, step.codes[j], x, j)
        if format_.offset:
            found = builder.add(found, splat(builder, word(INT32, of_sums + 4 * i), words))
        scaled = builder.fmul(row_scales, scale)
        total = builder.call(fma, (builder.sitofp(found, floats), scaled, total))
    if step.minimum is not None:
        of_sum = splat(builder, word(ir.FloatType(), of_sums), floats)
        total = builder.call(fma, (step.minimum, of_sum, total))
    _store(builder, total, place, 0)


def _store(builder, values, floats, at):
    place = builder.bitcast(builder.gep(floats, [INT64(at)]), values.type.as_pointer())
    builder.store(values, place, align=4)
