"""The kernel that runs a list of kernels: all threads go through it together."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quire.kernels.numba.code.memory import claim, count_of

PATIENCE = 10_000  # looks at whether the others have come


@intrinsic
def _call(typing_context, function, argument):
    def generate(context, builder, signature, arguments):
        pointer = ir.FunctionType(ir.VoidType(), (ir.IntType(64),)).as_pointer()
        builder.call(builder.inttoptr(arguments[0], pointer), (arguments[1],))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _ask(typing_context, function):
    """What a function without arguments returns."""

    def generate(context, builder, signature, arguments):
        pointer = ir.FunctionType(ir.IntType(32), ()).as_pointer()
        found = builder.call(builder.inttoptr(arguments[0], pointer), ())
        return builder.sext(found, ir.IntType(64))

    return types.int64(types.int64), generate


def replay(arguments):
    a = arguments[0]
    threads = 1
    if a.team_size:
        threads = _ask(a.team_size)
    for i in range(a.launches):
        _call(a.calls[2 * i], a.calls[2 * i + 1])
        claim(arguments, 0)
        looks = 0
        while count_of(arguments, 0) < (i + 1) * threads:
            looks += 1
            if looks > PATIENCE:  # the thread that is waited for may not be running
                _ask(a.give_way)
