"""The product of a tile of tokens with sixteen rows of weights in 16 bits, or of those widened.

A weight of some rows is widened once, and multiplied with a number of each token. A token's sums go
over a row in one order, whatever the size of the tile.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.gguf_blocks import TYPES
from quire.kernels.numba.code.gguf.dot import register_lanes
from quire.kernels.numba.sizes import LANES

FLOAT, INT64, WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
COLUMNS = TYPES["F16"].values  # of a block
LOADED = 4  # numbers of a token, at once


@intrinsic(prefer_literal=True)
def add_tile(typing_context, kind, tokens, weights, x, size, blocks, sums):
    """Add the product of `blocks` of sixteen rows with `x[tokens, size]` to `sums[tokens, 16]`;
    `tokens` is a constant. `weights` are of the type that `kind` is named after, or float32."""
    count = tokens.literal_value
    # More rows with fewer tokens, so that on ARM sums stay in registers beside what is multiplied.
    lanes = LANES if count < 8 or register_lanes() == LANES else LANES // 2
    floats, loaded = ir.VectorType(FLOAT, lanes), ir.VectorType(FLOAT, LOADED)

    def generate(context, builder, signature, arguments):
        _, _, base, x, size, blocks, out = arguments
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(floats, (floats,) * 3), f"llvm.fma.v{lanes}f32"
        )
        rows = [builder.gep(x, [builder.mul(size, INT64(token))]) for token in range(count)]
        for first in range(0, LANES, lanes):
            places = [builder.gep(out, [INT64(token * LANES + first)]) for token in range(count)]
            places = [builder.bitcast(each, floats.as_pointer()) for each in places]
            totals = [builder.load(each, align=4) for each in places]
            totals = [cgutils.alloca_once_value(builder, each) for each in totals]
            with cgutils.for_range(builder, blocks) as loop:
                column = builder.mul(loop.index, INT64(COLUMNS))
                for i in range(COLUMNS):
                    at = builder.add(column, INT64(i))
                    if i % LOADED == 0:
                        starts = [builder.gep(row, [at]) for row in rows]
                        starts = [builder.bitcast(each, loaded.as_pointer()) for each in starts]
                        numbers = [builder.load(each, align=4) for each in starts]
                    number = builder.add(builder.mul(at, INT64(LANES)), INT64(first))
                    weight = _numbers(builder, kind.name, weights.dtype, base, number, lanes)
                    same = ir.VectorType(WORD, lanes)([i % LOADED] * lanes)
                    for own, total in zip(numbers, totals, strict=True):
                        factor = builder.shuffle_vector(own, loaded(ir.Undefined), same)
                        added = builder.call(fma, (weight, factor, builder.load(total)))
                        builder.store(added, total)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(kind, tokens, weights, x, types.int64, types.int64, sums), generate


@intrinsic
def widened(typing_context, kind, weights, column, out):
    """Put a column of sixteen rows into `out`, in float32."""

    def generate(context, builder, signature, arguments):
        _, base, column, out = arguments
        at = builder.mul(column, INT64(LANES))
        found = _numbers(builder, kind.name, weights.dtype, base, at, LANES)
        place = builder.bitcast(builder.gep(out, [at]), found.type.as_pointer())
        builder.store(found, place, align=4)
        return context.get_dummy_value()

    return types.void(kind, weights, types.int64, out), generate


def _numbers(builder, kind, element, base, index, lanes):
    """The weights from number `index` on, in float32."""
    floats, words = ir.VectorType(FLOAT, lanes), ir.VectorType(WORD, lanes)
    if element == types.float32:
        place = builder.gep(base, [index])
        return builder.load(builder.bitcast(place, floats.as_pointer()), align=4)
    stored = ir.VectorType(ir.HalfType() if kind == "F16" else ir.IntType(16), lanes)
    place = builder.gep(base, [builder.mul(index, INT64(2))])
    found = builder.load(builder.bitcast(place, stored.as_pointer()), align=2)
    if kind == "F16":
        return builder.fpext(found, floats)
    upper = builder.shl(builder.zext(found, words), words([16] * lanes))
    return builder.bitcast(upper, floats)
