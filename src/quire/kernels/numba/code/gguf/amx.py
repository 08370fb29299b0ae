"""Products with tiles of sixteen tokens by AMX: a matrix unit for bytes, which x86 servers have.

First the codes of sixteen rows are unpacked into memory, for all tokens to come; of each step

    8 vectors, each with four neighbouring codes of every row │ scales │ minima

Then the unit multiplies a step's digits, of sixteen tokens, with these codes, and leaves sums in
memory. Those become numbers, and are added, as `tile.py` does it: so a token has the same bits
whichever of both computes it.

    its tiles 0, 1   [16 tokens, 16 rows]: sums of the first digits, of the second
    2, 3             [16 tokens, 32]: first digits, second
    4                [8, 16 rows × 4]: codes

A product of so few numbers costs the unit little; what takes time is its sums, which come back
through memory. Types with two scales a step have twice as many: those stay with `tile.py`, and so
do fewer tokens than `AMX_LEAST`, which do not make up for unpacking.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.code.gguf.activations import DIGIT_BITS
from quire.kernels.numba.code.gguf.dot import INT8, INT32, has_amx, splat, words_of
from quire.kernels.numba.code.gguf.formats import FORMATS
from quire.kernels.numba.code.gguf.reader import INT64, VECTORS, Reader, constant, floats_of
from quire.kernels.numba.sizes import (
    AMX_LEAST,
    AMX_TOKENS,
    DIGITS,
    LANES,
    SMALLER_TILE,
    STEP,
    TOKEN_BYTES,
    UNPACKED_BYTES,
)

VECTOR_BYTES = 64  # as many as a tile's row has, at most
CONFIGURATION_BYTES = 64
OF_DIGITS, OF_CODES = 2, 4  # the unit's tiles; those of sums are the first
# Steps, a power of two: what the unit has written can be read when all that was begun before is
# done, and written, too. Without a distance a step takes 134 cycles instead of 97.
DISTANCE = 4


def serves(format_):
    """Whether its products are faster so."""
    return has_amx() and format_.scales == 1


@intrinsic
def largest_tile(typing_context, kind, tokens):
    """In how many tokens that many are multiplied at a time, at most."""

    def generate(context, builder, signature, arguments):
        if not serves(FORMATS[kind.name]):
            return INT64(SMALLER_TILE)
        are_many = builder.icmp_signed(">=", arguments[1], INT64(AMX_LEAST))
        return builder.select(are_many, INT64(AMX_TOKENS), INT64(SMALLER_TILE))

    return types.int64(kind, types.int64), generate


@intrinsic
def begin(typing_context, kind):
    """Shape the unit's tiles."""

    def generate(context, builder, signature, arguments):
        if serves(FORMATS[kind.name]):
            _load_configuration(builder)
        return context.get_dummy_value()

    return types.void(kind), generate


@intrinsic
def end(typing_context, kind):
    """Leave the unit as it was found."""

    def generate(context, builder, signature, arguments):
        if serves(FORMATS[kind.name]):
            call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(kind), generate


def _load_configuration(builder):
    """Of each tile its rows, and the bytes of one; the palette is that of eight tiles of 1 KiB."""
    kind = ir.ArrayType(INT8, CONFIGURATION_BYTES)
    place = cgutils.alloca_once(builder, kind)
    builder.store(kind(None), place)

    def put(at, value):
        builder.store(INT8(value), builder.gep(place, [INT32(0), INT32(at)]))

    put(0, 1)
    sums = [(digit, AMX_TOKENS, VECTOR_BYTES) for digit in range(DIGITS)]
    digits = [(OF_DIGITS + digit, AMX_TOKENS, STEP) for digit in range(DIGITS)]
    for tile, rows, row_bytes in [*sums, *digits, (OF_CODES, VECTORS, VECTOR_BYTES)]:
        put(16 + 2 * tile, row_bytes)
        put(48 + tile, rows)
    call(builder, "ldtilecfg", builder.bitcast(place, INT8.as_pointer()))


@intrinsic
def unpack(typing_context, kind, weights, apart, blocks, unpacked):
    """Of `blocks` of sixteen rows, what `multiply_unpacked` reads; `apart` is as in `tile.py`."""
    format_ = FORMATS[kind.name]

    def generate(context, builder, signature, arguments):
        _, weights, apart, blocks, unpacked = arguments
        if serves(format_):
            scales = cgutils.unpack_tuple(builder, apart, 3)
            _emit_unpack(builder, format_, weights, scales, blocks, unpacked)
        return context.get_dummy_value()

    return types.void(kind, weights, apart, types.int64, unpacked), generate


@intrinsic
def multiply_unpacked(typing_context, kind, unpacked, x, blocks, out):
    """A tile of sixteen tokens with sixteen rows: `out[tokens, 16]`."""
    format_ = FORMATS[kind.name]

    def generate(context, builder, signature, arguments):
        _, unpacked, x, blocks, out = arguments
        if serves(format_):
            steps = builder.mul(blocks, INT64(format_.block.values // STEP))
            _emit_product(builder, _Tile(builder, format_, unpacked, x), steps, out)
        return context.get_dummy_value()

    return types.void(kind, unpacked, x, types.int64, out), generate


def _emit_unpack(builder, format_, weights, apart, blocks, unpacked):
    scales, scale_stride, blocks_of_scale = apart
    chunk_steps = format_.block.values // STEP // format_.chunks
    with cgutils.for_range(builder, blocks) as loop:
        block_bytes = INT64(LANES * format_.block.bytes)
        base = builder.gep(weights, [builder.mul(loop.index, block_bytes)])
        scale = builder.udiv(loop.index, blocks_of_scale)
        own_scales = builder.gep(scales, [builder.mul(scale, scale_stride)])
        reader = Reader(builder, base, LANES, INT64(0), own_scales)
        prepared = format_.prepare(reader)
        first = builder.mul(loop.index, INT64(format_.chunks))
        with cgutils.for_range(builder, INT64(format_.chunks)) as chunks:
            start = builder.mul(builder.add(first, chunks.index), INT64(chunk_steps))
            for i, step in enumerate(format_.steps(reader, prepared, chunks.index)):
                number = builder.add(start, INT64(i))
                for index, vector in enumerate([*step.codes, *step.scales, *step.minima]):
                    place = _unpacked_place(builder, unpacked, number, index)
                    place = builder.bitcast(place, vector.type.as_pointer())
                    builder.store(vector, place, align=VECTOR_BYTES)


def _unpacked_place(builder, unpacked, number, index):
    """Of a step's codes, and the numbers behind them, a vector."""
    step = builder.gep(unpacked, [builder.mul(number, INT64(UNPACKED_BYTES))])
    return builder.gep(step, [INT64(VECTOR_BYTES * index)])


def _emit_product(builder, tile, steps, out):
    distance, zero = INT64(DISTANCE), INT64(0)
    with cgutils.for_range(builder, builder.add(steps, distance)) as loop:
        before = builder.sub(loop.index, distance)
        with builder.if_then(builder.icmp_signed(">=", before, zero)):
            tile.add(before)
        with builder.if_then(builder.icmp_signed("<", loop.index, steps)):
            tile.multiply(loop.index)
    for token, total in enumerate(tile.totals):
        values = builder.load(total)
        place = builder.gep(out, [INT64(token * LANES)])
        builder.store(values, builder.bitcast(place, values.type.as_pointer()), align=4)


class _Tile:
    """What sixteen tokens make of the steps of sixteen rows."""

    def __init__(self, builder, format_, unpacked, x):
        self.builder, self.format, self.unpacked, self.x = builder, format_, unpacked, x
        kind = ir.ArrayType(words_of(LANES), DISTANCE * DIGITS * AMX_TOKENS)
        self.sums = cgutils.alloca_once(builder, kind)
        self.sums.align = VECTOR_BYTES
        zero = floats_of(LANES)(None)
        self.totals = [cgutils.alloca_once_value(builder, zero) for _ in range(AMX_TOKENS)]

    def multiply(self, number):
        """A step's digits by its codes."""
        builder, row_bytes = self.builder, INT64(VECTOR_BYTES)
        record = self._record(number)
        codes = _unpacked_place(builder, self.unpacked, number, 0)
        call(builder, "tileloadd64", INT8(OF_CODES), codes, row_bytes)
        for digit in range(DIGITS):
            digits = builder.gep(record, [INT64(digit * STEP)])
            tile, sums = INT8(OF_DIGITS + digit), INT8(digit)
            call(builder, "tileloadd64", tile, digits, INT64(DIGITS * STEP))
            call(builder, "tilezero", sums)
            call(builder, "tdpbsud", sums, tile, INT8(OF_CODES))
            place = builder.bitcast(self._sums(number, digit, 0), INT8.as_pointer())
            call(builder, "tilestored64", sums, place, row_bytes)

    def add(self, number):
        """What the scale makes of a step's sums, to the tokens' totals."""
        builder, floats, words = self.builder, floats_of(LANES), words_of(LANES)
        record, format_ = self._record(number), self.format
        of_scales = DIGITS * STEP * AMX_TOKENS
        of_sums = of_scales + 4 * AMX_TOKENS
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(floats, (floats,) * 3), f"llvm.fma.v{LANES}f32"
        )

        def word(kind, at):
            place = builder.bitcast(builder.gep(record, [INT64(at)]), kind.as_pointer())
            return splat(builder, builder.load(place, align=1), ir.VectorType(kind, LANES))

        def numbers(index):
            place = _unpacked_place(builder, self.unpacked, number, VECTORS + index)
            return builder.load(builder.bitcast(place, floats.as_pointer()), align=VECTOR_BYTES)

        row_scales, *minima = (numbers(i) for i in range(1 + format_.minima))
        for token, place in enumerate(self.totals):
            total = builder.load(place)
            first, second = (
                builder.load(self._sums(number, digit, token), align=VECTOR_BYTES)
                for digit in range(DIGITS)
            )
            found = builder.add(builder.shl(first, constant(words, DIGIT_BITS)), second)
            if format_.offset:
                found = builder.add(found, word(INT32, of_sums + 8 * token))
            scaled = builder.fmul(row_scales, word(ir.FloatType(), of_scales + 4 * token))
            total = builder.call(fma, (builder.sitofp(found, floats), scaled, total))
            for minimum in minima:
                of_sum = word(ir.FloatType(), of_sums + 8 * token)
                total = builder.call(fma, (minimum, of_sum, total))
            builder.store(total, place)

    def _record(self, number):
        """Of a step: digits, scales and sums of the activations."""
        size = INT64(AMX_TOKENS * TOKEN_BYTES)
        return self.builder.gep(self.x, [self.builder.mul(number, size)])

    def _sums(self, number, digit, token):
        """Of a step, which takes the place of the one `DISTANCE` before it."""
        turn = self.builder.and_(number, INT64(DISTANCE - 1))
        index = INT64(digit * AMX_TOKENS + token)
        index = self.builder.add(self.builder.mul(turn, INT64(DIGITS * AMX_TOKENS)), index)
        return self.builder.gep(self.sums, [INT64(0), index])


def call(builder, name, *arguments):
    """An instruction of the unit."""
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)
