"""Sums of products of bytes, four to a lane, by the instruction that the machine has for them."""

from __future__ import annotations

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from quire.kernels.numba.simd import LANES, WORDS

BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)


def has_feature(name: str) -> bool:
    """Whether Numba compiles for machines with this."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{name}" in features.split(",")


def is_unsigned() -> bool:
    """Whether codes are taken as 0 to 255 (else −128 to 127); activations always have a sign."""
    return has_feature("avx512vnni")


def dot(builder: ir.IRBuilder, sums, codes, x):
    """Add to each of sixteen int32 the products of its four bytes of `codes` with those of `x`."""
    if has_feature("avx512vnni"):
        return _vnni(builder, sums, codes, x)
    if has_feature("dotprod"):
        return _sdot(builder, sums, codes, x)
    return _plain(builder, sums, codes, x)


def _vnni(builder, sums, codes, x):
    kind = BYTES if llvmlite.binding.llvm_version_info >= (22,) else WORDS
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(WORDS, (WORDS, kind, kind)), "llvm.x86.avx512.vpdpbusd.512"
    )
    return builder.call(function, (sums, builder.bitcast(codes, kind), builder.bitcast(x, kind)))


def _sdot(builder, sums, codes, x):
    """Four lanes at a time."""
    four, sixteen = ir.VectorType(ir.IntType(32), 4), ir.VectorType(ir.IntType(8), 16)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(four, (four, sixteen, sixteen)),
        "llvm.aarch64.neon.sdot.v4i32.v16i8",
    )
    x = builder.bitcast(x, BYTES)
    quarters = [
        builder.call(
            function,
            (
                _part(builder, sums, 4 * i, 4),
                _part(builder, codes, 16 * i, 16),
                _part(builder, x, 16 * i, 16),
            ),
        )
        for i in range(4)
    ]
    low, high = _joined(builder, *quarters[:2]), _joined(builder, *quarters[2:])
    return _joined(builder, low, high)


def _plain(builder, sums, codes, x):
    x = builder.bitcast(x, BYTES)
    wide = ir.VectorType(ir.IntType(32), 4 * LANES)
    products = builder.mul(builder.sext(codes, wide), builder.sext(x, wide))
    for i in range(4):
        every_fourth = ir.Constant(WORDS, [4 * lane + i for lane in range(LANES)])
        part = builder.shuffle_vector(products, wide(ir.Undefined), every_fourth)
        sums = builder.add(sums, part)
    return sums


def _part(builder, vector, start, count):
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), count), [*range(start, start + count)])
    return builder.shuffle_vector(vector, vector.type(ir.Undefined), lanes)


def _joined(builder, left, right):
    count = 2 * left.type.count
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), count), [*range(count)])
    return builder.shuffle_vector(left, right, lanes)
