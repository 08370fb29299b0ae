"""What kernels need below Python besides SIMD vectors: moving pointers, claiming work, fetching."""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

INT64 = ir.IntType(64)
CACHE_LINE = 64  # bytes

# A function that only kernels call: without the ways into it from Python and C, which take longer
# to compile than the function itself.
helper = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")


@intrinsic
def shift(typing_context, numbers, count):
    """A pointer to `numbers[count]`."""

    def generate(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return numbers(numbers, types.int64), generate


@intrinsic
def claim(typing_context, memory, index):
    """Count up the int64 at `memory[index]` and return what it was: each thread sees another."""

    def generate(context, builder, signature, arguments):
        counters = builder.bitcast(arguments[0], INT64.as_pointer())
        counter = builder.gep(counters, [arguments[1]])
        return builder.atomic_rmw("add", counter, INT64(1), "acq_rel")

    return types.int64(memory, types.int64), generate


def emit_prefetch(builder, place):
    """Have the cache line of `place` fetched meanwhile."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), (byte, word, word, word))
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    place = builder.bitcast(place, byte)
    builder.call(function, (place, word(0), word(3), word(1)))  # to read, into L1, data


@intrinsic
def prefetch(typing_context, numbers, index):
    """Have the cache line of `numbers[index]` fetched meanwhile."""

    def generate(context, builder, signature, arguments):
        emit_prefetch(builder, builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(numbers, types.int64), generate


@intrinsic
def count_of(typing_context, memory, index):
    """The int64 at `memory[index]`, which other threads count up."""

    def generate(context, builder, signature, arguments):
        counters = builder.bitcast(arguments[0], INT64.as_pointer())
        counter = builder.gep(counters, [arguments[1]])
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(memory, types.int64), generate


@intrinsic(prefer_literal=True)
def floats_on_stack(typing_context, count):
    """Room for a constant count of float32. It begins at a cache line, so LLVM has all of this
    stack begin at one: vectors that it keeps there, for want of registers, lie in one line each."""

    def generate(context, builder, signature, arguments):
        room = ir.ArrayType(ir.FloatType(), count.literal_value)
        with builder.goto_entry_block():
            place = builder.alloca(room)  # Numba's own would be filled with zeros
        place.align = CACHE_LINE
        return builder.bitcast(place, ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(count), generate
