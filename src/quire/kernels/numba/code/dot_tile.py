"""Products of a few rows of a matrix with a few tokens, whose sums all stay in registers.

Each of `rows` times `tokens` sums is one vector, which what is loaded of a row and of a token is
added to; so a load serves as many products as there are tokens, or rows. On ARM 4 by 4 sums of one
register each leave half of the registers to load into. Wider vectors (`simd.py`) would be four
registers each, of 2 by 2: as many sums, and twice the loads.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.code.memory import emit_prefetch

IS_ARM = platform.machine() in ("aarch64", "arm64")
WIDTH = 4 if IS_ARM else 16  # numbers of a sum
MOST = 4 if IS_ARM else 2  # rows, and tokens, of a tile
VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
FUSED = ("contract",)
LINE = 16  # numbers of a cache line, which a row's size is a multiple of


def dot_tile(rows: int, tokens: int):
    """`out[t, r] = w[r] · x[t]`; rows of `w` and of `x` are `size` numbers long, those of `out`
    `stride`."""

    @intrinsic
    def multiply(typing_context, w, x, out, size, stride):
        def generate(context, builder, signature, arguments):
            w, x, out, size, stride = arguments
            zero = VECTOR([0.0] * WIDTH)
            sums = [
                [cgutils.alloca_once_value(builder, zero) for _ in range(tokens)]
                for _ in range(rows)
            ]
            int64 = size.type
            with cgutils.for_range_slice(builder, int64(0), size, int64(LINE)) as (line, _):
                for r in range(rows, 2 * rows):  # which come next, a cache line at a time
                    emit_prefetch(builder, _place(builder, w, size, r, line))
                for step in range(0, LINE, WIDTH):
                    at = builder.add(line, int64(step))
                    ours = [_load(builder, w, size, r, at) for r in range(rows)]
                    theirs = [_load(builder, x, size, t, at) for t in range(tokens)]
                    for r in range(rows):
                        for t in range(tokens):
                            product = builder.fmul(ours[r], theirs[t], flags=FUSED)
                            found = builder.fadd(builder.load(sums[r][t]), product, flags=FUSED)
                            builder.store(found, sums[r][t])
            for r in range(rows):
                for t in range(tokens):
                    place = builder.add(builder.mul(stride, int64(t)), int64(r))
                    found = _total(builder, builder.load(sums[r][t]))
                    builder.store(found, builder.gep(out, [place]))
            return context.get_dummy_value()

        return types.void(w, x, out, types.int64, types.int64), generate

    return multiply


def _place(builder, numbers, size, row, at):
    return builder.gep(numbers, [builder.add(builder.mul(size, size.type(row)), at)])


def _load(builder, numbers, size, row, at):
    place = _place(builder, numbers, size, row, at)
    return builder.load(builder.bitcast(place, VECTOR.as_pointer()), align=4)


def _total(builder, vector):
    """The first half with the second, until one is left."""
    numbers = [builder.extract_element(vector, ir.IntType(32)(i)) for i in range(WIDTH)]
    while len(numbers) > 1:
        half = len(numbers) // 2
        pairs = zip(numbers[:half], numbers[half:], strict=True)
        numbers = [builder.fadd(low, high) for low, high in pairs]
    return numbers[0]
