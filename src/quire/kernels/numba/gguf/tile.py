"""The product of a tile of tokens with sixteen rows of weights, in registers.

Each number is summed in the same order whatever the size of the tile, and each product is fused
with its sum by intent, not by leave: so a token's results do not depend on its neighbours.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.gguf.activations import TOKEN_BYTES
from quire.kernels.numba.gguf.dot import dot
from quire.kernels.numba.gguf.formats import FORMATS, INT32, STEP, VECTORS, Reader, splat
from quire.kernels.numba.simd import FLOATS, LANES, WORDS

INT64 = ir.IntType(64)


@intrinsic(prefer_literal=True)
def multiply_tile(typing_context, kind, tokens, weights, x, blocks, out):
    """`blocks` of sixteen rows with a tile of `tokens`, a constant: `out[tokens, 16]`.

    `kind` is a value of no meaning, whose type has the name of the weights' type.
    """
    format_, count = FORMATS[kind.name], tokens.literal_value

    def generate(context, builder, signature, arguments):
        _, _, weights, x, blocks, out = arguments
        sums = [cgutils.alloca_once_value(builder, FLOATS(None)) for _ in range(count)]
        block_bytes = INT64(LANES * format_.block.bytes)
        chunk_steps = format_.block.values // STEP // format_.chunks
        with cgutils.for_range(builder, blocks) as loop:
            base = builder.gep(weights, [builder.mul(loop.index, block_bytes)])
            reader = Reader(builder, base)
            prepared = format_.prepare(reader)
            first = builder.mul(loop.index, INT64(format_.chunks))
            with cgutils.for_range(builder, INT64(format_.chunks)) as chunks:
                chunk = builder.add(first, chunks.index)
                record_bytes = count * TOKEN_BYTES
                start = builder.mul(chunk, INT64(chunk_steps * record_bytes))
                for i, step in enumerate(format_.steps(reader, prepared, chunks.index)):
                    at = builder.add(start, INT64(i * record_bytes))
                    record = builder.gep(x, [at])
                    for token in range(count):
                        _add_step(builder, format_, step, record, token, count, sums[token])
        for token, total in enumerate(sums):
            place = builder.gep(out, [INT64(token * LANES)])
            place = builder.bitcast(place, FLOATS.as_pointer())
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(kind, tokens, weights, x, types.int64, out), generate


def _add_step(builder, format_, step, record, token, count, total):
    """Add 32 products of one token with each row to `total`."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(FLOATS, (FLOATS,) * 3), "llvm.fma.v16f32"
    )

    def word(kind, at):
        place = builder.bitcast(builder.gep(record, [INT64(at)]), kind.as_pointer())
        return builder.load(place, align=1)

    words = (STEP + 4) * count + 8 * token
    scale = splat(builder, word(ir.FloatType(), STEP * count + 4 * token), FLOATS)
    each = VECTORS // format_.scales
    for i, row_scales in enumerate(step.scales):
        found = WORDS(None)
        if format_.offset:
            found = splat(builder, word(INT32, words + 4 * i), WORDS)
        for j in range(i * each, (i + 1) * each):
            four = splat(builder, word(INT32, STEP * token + 4 * j), WORDS)
            found = dot(builder, found, step.codes[j], four)
        scaled = builder.fmul(row_scales, scale)
        floats = builder.sitofp(found, FLOATS)
        builder.store(builder.call(fma, (floats, scaled, builder.load(total))), total)
    if step.minimum is not None:
        of_sum = splat(builder, word(ir.FloatType(), words), FLOATS)
        builder.store(builder.call(fma, (step.minimum, of_sum, builder.load(total))), total)
