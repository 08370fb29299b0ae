"""SIMD vectors of sixteen float32: what kernels compute with.

The compiler turns them into whatever registers a machine has (four on ARM, one with AVX-512), so a
kernel's speed does not hang on whether a loop was recognised. In memory numbers may also be
bfloat16: the upper half of a float32, handled as a `uint16`. Products and sums may be fused, but
nothing is reordered, and NaN and infinity stay what they are.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import (
    intrinsic,
    lower_builtin,
    models,
    register_model,
    type_callable,
)

from quire.kernels.numba.code.memory import CACHE_LINE
from quire.kernels.numba.sizes import LANES

FLOATS, WORDS, HALVES = (
    ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16))
)


class SimdVector(types.Type):
    def __init__(self) -> None:
        super().__init__("SimdVector")


vector = SimdVector()


@register_model(SimdVector)
class SimdVectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, FLOATS)


def _splat(builder, scalar):
    first = builder.insert_element(FLOATS(ir.Undefined), scalar, ir.IntType(32)(0))
    zeros = ir.VectorType(ir.IntType(32), LANES)(None)
    return builder.shuffle_vector(first, FLOATS(ir.Undefined), zeros)


def _define(symbol, instruction: str) -> None:
    """Arithmetic lane by lane; the right-hand side may be one number for all lanes."""

    @type_callable(symbol)
    def _result(context):
        def typer(left, right):
            if left is vector and right in (vector, types.float32):
                return vector
            return None

        return typer

    @lower_builtin(symbol, vector, vector)
    def _of_vectors(context, builder, signature, arguments):
        return getattr(builder, instruction)(*arguments, flags=("contract",))

    @lower_builtin(symbol, vector, types.float32)
    def _of_scalar(context, builder, signature, arguments):
        right = _splat(builder, arguments[1])
        return getattr(builder, instruction)(arguments[0], right, flags=("contract",))


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")
_define(operator.truediv, "fdiv")


@intrinsic
def splat(typing_context, number):
    def generate(context, builder, signature, arguments):
        return _splat(builder, arguments[0])

    return vector(types.float32), generate


@intrinsic
def load(typing_context, numbers, first):
    """The numbers of a tensor from index `first` on."""
    element = numbers.dtype

    def generate(context, builder, signature, arguments):
        start = builder.gep(arguments[0], [arguments[1]])
        if element == types.float32:
            return builder.load(builder.bitcast(start, FLOATS.as_pointer()), align=4)
        halves = builder.load(builder.bitcast(start, HALVES.as_pointer()), align=2)
        words = builder.shl(builder.zext(halves, WORDS), WORDS([16] * LANES))
        return builder.bitcast(words, FLOATS)

    return vector(numbers, types.int64), generate


@intrinsic
def store(typing_context, numbers, first, values):
    """Put `values` into a tensor; as bfloat16, the nearest is taken, and of two the even one."""
    element = numbers.dtype

    def generate(context, builder, signature, arguments):
        pointer, index, values = arguments
        start = builder.gep(pointer, [index])
        if element == types.float32:
            builder.store(values, builder.bitcast(start, FLOATS.as_pointer()), align=4)
        else:
            halves = _to_bfloat16(builder, values)
            builder.store(halves, builder.bitcast(start, HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, vector), generate


@intrinsic
def store_past_caches(typing_context, numbers, first, values):
    """Put `values` into float32 that fill a cache line and that nobody reads soon. Other threads
    may read it after this one's next `claim`."""

    def generate(context, builder, signature, arguments):
        pointer, index, values = arguments
        start = builder.bitcast(builder.gep(pointer, [index]), FLOATS.as_pointer())
        stored = builder.store(values, start, align=CACHE_LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(numbers, types.int64, vector), generate


def _to_bfloat16(builder, values):
    words = builder.bitcast(values, WORDS)
    upper = builder.lshr(words, WORDS([16] * LANES))
    is_odd = builder.and_(upper, WORDS([1] * LANES))
    rounded = builder.add(words, builder.add(is_odd, WORDS([0x7FFF] * LANES)))
    # The bits of a NaN are not rounded: they could carry over into those of an infinity.
    is_number = builder.fcmp_ordered("ord", values, values)
    quiet = builder.or_(upper, WORDS([0x40] * LANES))
    halves = builder.select(is_number, builder.lshr(rounded, WORDS([16] * LANES)), quiet)
    return builder.trunc(halves, HALVES)


@intrinsic
def rounded_as(typing_context, numbers, value):
    """A float32 as a tensor of these numbers would hold it."""
    element = numbers.dtype

    def generate(context, builder, signature, arguments):
        value = arguments[1]
        if element == types.float32:
            return value
        halves = _to_bfloat16(builder, _splat(builder, value))
        word = builder.zext(builder.extract_element(halves, ir.IntType(32)(0)), ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.IntType(32)(16)), ir.FloatType())

    return types.float32(numbers, types.float32), generate


def _fold(builder, vector, combine):
    """The first half with the second, until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                vector, vector.type(ir.Undefined), ir.VectorType(ir.IntType(32), width)(each)
            )
            for each in ([*range(width)], [*range(width, 2 * width)])
        )
        vector = combine(low, high)
    return builder.extract_element(vector, ir.IntType(32)(0))


def _larger(builder, left, right):
    return builder.select(builder.fcmp_ordered("olt", left, right), right, left)


@intrinsic
def total(typing_context, values):
    """The sum over all lanes."""

    def generate(context, builder, signature, arguments):
        return _fold(builder, arguments[0], builder.fadd)

    return types.float32(vector), generate


@intrinsic
def highest(typing_context, values):
    def generate(context, builder, signature, arguments):
        return _fold(builder, arguments[0], lambda a, b: _larger(builder, a, b))

    return types.float32(vector), generate


@intrinsic
def larger(typing_context, left, right):
    """The larger of each pair; where `left` is NaN, that."""

    def generate(context, builder, signature, arguments):
        return _larger(builder, *arguments)

    return vector(vector, vector), generate


@intrinsic
def minus_magnitude(typing_context, values):
    """`-abs(values)`: the sign bit is set."""

    def generate(context, builder, signature, arguments):
        words = builder.bitcast(arguments[0], WORDS)
        return builder.bitcast(builder.or_(words, WORDS([0x80000000] * LANES)), FLOATS)

    return vector(vector), generate


@intrinsic
def magnitude(typing_context, values):
    """`abs(values)`: the sign bit is cleared."""

    def generate(context, builder, signature, arguments):
        words = builder.bitcast(arguments[0], WORDS)
        return builder.bitcast(builder.and_(words, WORDS([0x7FFFFFFF] * LANES)), FLOATS)

    return vector(vector), generate


def round_lanes(builder, values):
    kind = ir.FunctionType(FLOATS, (FLOATS,))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
    return builder.call(function, (values,))


@intrinsic
def rounded(typing_context, values):
    """The nearest integers, and of two the even ones."""

    def generate(context, builder, signature, arguments):
        return round_lanes(builder, arguments[0])

    return vector(vector), generate


@intrinsic
def where_negative(typing_context, values, then, otherwise):
    """`then` where the sign bit of `values` is set, else `otherwise`."""

    def generate(context, builder, signature, arguments):
        words = builder.bitcast(arguments[0], WORDS)
        is_negative = builder.icmp_signed("<", words, WORDS(None))
        return builder.select(is_negative, *arguments[1:])

    return vector(vector, vector, vector), generate
