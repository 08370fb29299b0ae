"""The product of a tile of tokens with twice sixteen rows of float32, each sixteen interleaved.

A column of sixteen rows is one load, and a number of a token is multiplied with all of them: no sum
goes across lanes. With AVX-512 all sums stay in registers; other machines, which have fewer or
smaller ones, take half of sixteen rows at a time. A token's sums go over a row in one order,
whatever the size of the tile.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.code.gguf.dot import has_feature
from quire.kernels.numba.code.memory import emit_prefetch
from quire.kernels.numba.sizes import FLOAT_COLUMNS, LANES

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
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
        factors = [_factors(builder, row, column, vector) for row in rows]
        for i in range(COLUMNS):
            line = builder.mul(builder.add(column, INT64(i)), INT64(LANES))
            ahead = builder.add(line, INT64(AHEAD * LANES))
            weights = []
            for own, _ in groups:
                place = builder.bitcast(builder.gep(own, [line]), vector.as_pointer())
                weights.append(builder.load(place, align=4))
                emit_prefetch(builder, builder.gep(own, [ahead]))
            for of_token, totals in zip(factors, sums, strict=True):
                factor = of_token[i]()
                for weight, total in zip(weights, totals, strict=True):
                    builder.store(builder.call(fma, (weight, factor, builder.load(total))), total)
    for token, totals in enumerate(sums):
        for (_, out), total in zip(groups, totals, strict=True):
            place = builder.gep(out, [INT64(token * LANES)])
            place = builder.bitcast(place, vector.as_pointer())
            builder.store(builder.load(total), place, align=4)


def _factors(builder, row, column, vector):
    """What makes vectors of some neighbouring numbers, each in all lanes: from one load on ARM,
    whose products take any lane of a register; else from as many, which products do themselves."""
    if not has_feature("dotprod"):
        places = [builder.gep(row, [builder.add(column, INT64(i))]) for i in range(COLUMNS)]
        return [partial(_splat_of, builder, place, vector) for place in places]
    few = ir.VectorType(FLOAT, COLUMNS)
    place = builder.bitcast(builder.gep(row, [column]), few.as_pointer())
    numbers = builder.load(place, align=4)
    return [partial(_lane, builder, numbers, i, vector) for i in range(COLUMNS)]


def _splat_of(builder, place, vector):
    first = builder.insert_element(vector(ir.Undefined), builder.load(place), INT32(0))
    return _lane(builder, first, 0, vector)


def _lane(builder, numbers, lane, vector):
    lanes = ir.VectorType(INT32, vector.count)([lane] * vector.count)
    return builder.shuffle_vector(numbers, numbers.type(ir.Undefined), lanes)
