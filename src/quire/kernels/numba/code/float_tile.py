"""The product of a tile of tokens with twice sixteen rows of float32, each sixteen interleaved.

A column of sixteen rows is one load, and a number of a token is multiplied with all of them: no sum
goes across lanes. With AVX-512 all sums stay in registers; other machines, which have fewer or
smaller ones, take half of sixteen rows at a time. A token's sums go over a row in one order,
whatever the size of the tile.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.code.gguf.dot import has_feature
from quire.kernels.numba.code.memory import emit_prefetch
from quire.kernels.numba.sizes import FLOAT_COLUMNS, LANES

FLOAT, INT64 = ir.FloatType(), ir.IntType(64)
COLUMNS = FLOAT_COLUMNS  # in a turn of the loop
AHEAD = 32  # columns, of which one is a cache line


@intrinsic(prefer_literal=True)
def multiply_tile(typing_context, tokens, first, second, x, size, out):
    """`out[2, tokens, 16]`, of `x[tokens, size]` with `first` and with `second` `[size, 16]`;
    `tokens` is a constant."""
    count = tokens.literal_value

    def generate(context, builder, signature, arguments):
        _, first, second, x, size, out = arguments
        places = [builder.gep(out, [INT64(i * count * LANES)]) for i in range(2)]
        both = tuple(zip((first, second), places, strict=True))
        if has_feature("avx512f"):
            _multiply(builder, both, LANES, count, x, size)
        else:
            for each in both:
                for half in range(0, LANES, LANES // 2):
                    part = [builder.gep(pointer, [INT64(half)]) for pointer in each]
                    _multiply(builder, (part,), LANES // 2, count, x, size)
        return context.get_dummy_value()

    return types.void(tokens, first, second, x, types.int64, out), generate


def _multiply(builder, groups, lanes, tokens, x, size):
    """`groups`: of each its weights and where its sums go, in which a line is `LANES` long."""
    vector = ir.VectorType(FLOAT, lanes)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, (vector,) * 3), f"llvm.fma.v{lanes}f32"
    )
    rows = [builder.gep(x, [builder.mul(size, INT64(token))]) for token in range(tokens)]
    zero = vector([0.0] * lanes)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in groups] for _ in rows]
    with cgutils.for_range_slice(builder, INT64(0), size, INT64(COLUMNS)) as (column, _):
        for i in range(COLUMNS):
            at = builder.add(column, INT64(i))
            line = builder.mul(at, INT64(LANES))
            ahead = builder.add(line, INT64(AHEAD * LANES))
            weights = []
            for own, _ in groups:
                place = builder.bitcast(builder.gep(own, [line]), vector.as_pointer())
                weights.append(builder.load(place, align=4))
                emit_prefetch(builder, builder.gep(own, [ahead]))
            for row, totals in zip(rows, sums, strict=True):
                factor = _splat(builder, builder.load(builder.gep(row, [at])), vector)
                for weight, total in zip(weights, totals, strict=True):
                    builder.store(builder.call(fma, (weight, factor, builder.load(total))), total)
    for token, totals in enumerate(sums):
        for (_, out), total in zip(groups, totals, strict=True):
            place = builder.gep(out, [INT64(token * LANES)])
            place = builder.bitcast(place, vector.as_pointer())
            builder.store(builder.load(total), place, align=4)


def _splat(builder, number, vector):
    first = builder.insert_element(vector(ir.Undefined), number, ir.IntType(32)(0))
    zeros = ir.VectorType(ir.IntType(32), vector.count)(None)
    return builder.shuffle_vector(first, vector(ir.Undefined), zeros)
