"""Sums of products of codes and activations, four to a lane, by the instruction that there is.

VNNI (x86), `sdot` (ARM)   bytes: activations are two digits, whose sums are joined in the end
AVX2, AVX-512              words of 16 bits: an activation is one
other machines             bytes, one product at a time
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from quire.kernels.numba.sizes import LANES

INT8, INT16, INT32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
BYTE_BITS = 8


def has_feature(name: str) -> bool:
    """Whether Numba compiles for machines with this."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{name}" in features.split(",")


def is_unsigned() -> bool:
    """Whether codes are taken as 0 to 255 (else −128 to 127); activations always have a sign."""
    return has_feature("avx512vnni")


def unpacks() -> bool:
    """Whether tiles of eight tokens are multiplied with unpacked codes (`unpacked.py`). On ARM that
    has not been measured."""
    return has_feature("avx2")


def takes_words() -> bool:
    """Whether products are those of whole activations, and not of their digits."""
    return has_feature("avx2") and not has_feature("avx512vnni")


def register_lanes() -> int:
    """How many rows' sums one register holds: so many are computed at a time."""
    if has_feature("dotprod"):
        return 4
    return 8 if has_feature("avx2") and not has_feature("avx512bw") else LANES


def bytes_of(lanes: int) -> ir.VectorType:
    return ir.VectorType(INT8, 4 * lanes)


def words_of(lanes: int) -> ir.VectorType:
    return ir.VectorType(INT32, lanes)


def dot(builder: ir.IRBuilder, sums: Any, codes: Any, x: Any, index: int) -> Any:
    """Add to each int32 the products of its four bytes of `codes` with the four activations, or
    digits of them, that are number `index` at `x`."""
    if takes_words():
        return _pairs(builder, sums, codes, x, index)
    if has_feature("avx512vnni"):
        return _vnni(builder, sums, codes, _word(builder, x, index, sums.type))
    if has_feature("dotprod"):
        return _sdot(builder, sums, codes, x, index)
    return _plain(builder, sums, codes, _word(builder, x, index, sums.type))


def splat(builder: ir.IRBuilder, scalar: Any, kind: ir.VectorType) -> Any:
    first = builder.insert_element(kind(ir.Undefined), scalar, INT32(0))
    zeros = ir.VectorType(INT32, kind.count)(None)
    return builder.shuffle_vector(first, kind(ir.Undefined), zeros)


def join_tops(builder: ir.IRBuilder, first: Any, second: Any, third: Any) -> Any:
    """Bytes with the upper two bits of three others, those of the first the lowest. Three
    instructions on ARM, of which the compiler, left alone, makes eight."""
    kind = first.type
    two, four, six = (ir.Constant(kind, [number] * kind.count) for number in (2, 4, 6))
    found = builder.lshr(third, two)
    if has_feature("dotprod"):
        insert = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, (kind, kind, INT32)),
            f"llvm.aarch64.neon.vsri.v{kind.count}i8",
        )
        found = builder.call(insert, (found, second, INT32(4)))
        return builder.call(insert, (found, first, INT32(6)))
    for mask, more in ((0x30, builder.lshr(second, four)), (0x3C, builder.lshr(first, six))):
        found = builder.and_(found, ir.Constant(kind, [mask] * kind.count))
        more = builder.and_(more, ir.Constant(kind, [0x3F & ~mask] * kind.count))
        found = builder.or_(found, more)
    return found


def _word(builder, x, index, kind):
    """In every lane."""
    place = builder.gep(builder.bitcast(x, INT32.as_pointer()), [INT32(index)])
    return splat(builder, builder.load(place, align=1), kind)


def _vnni(builder, sums, codes, x):
    kind = codes.type if llvmlite.binding.llvm_version_info >= (22,) else sums.type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(sums.type, (sums.type, kind, kind)),
        "llvm.x86.avx512.vpdpbusd.512",
    )
    return builder.call(function, (sums, builder.bitcast(codes, kind), builder.bitcast(x, kind)))


def _pairs(builder, sums, codes, x, index):
    """Even codes with even activations, then odd with odd: in memory these follow those."""
    words = ir.VectorType(INT16, 2 * sums.type.count)
    name = "avx512.pmaddw.d.512" if words.count == 32 else "avx2.pmadd.wd"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(sums.type, (words, words)), f"llvm.x86.{name}"
    )
    both = builder.bitcast(codes, words)
    byte = ir.Constant(words, [BYTE_BITS] * words.count)
    even, odd = builder.ashr(builder.shl(both, byte), byte), builder.ashr(both, byte)
    for i, half in enumerate((even, odd)):
        pair = builder.bitcast(_word(builder, x, 2 * index + i, sums.type), words)
        sums = builder.add(sums, builder.call(function, (half, pair)))
    return sums


def _sdot(builder, sums, codes, x, index):
    """The instruction takes any word of a register for all lanes: four words are loaded at once."""
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(sums.type, (sums.type, codes.type, codes.type)),
        "llvm.aarch64.neon.sdot.v4i32.v16i8",
    )
    four = builder.gep(builder.bitcast(x, sums.type.as_pointer()), [INT32(index // 4)])
    same = sums.type([index % 4] * 4)
    word = builder.shuffle_vector(builder.load(four, align=1), sums.type(ir.Undefined), same)
    return builder.call(function, (sums, codes, builder.bitcast(word, codes.type)))


def _plain(builder, sums, codes, x):
    x = builder.bitcast(x, codes.type)
    wide = ir.VectorType(INT32, codes.type.count)
    products = builder.mul(builder.sext(codes, wide), builder.sext(x, wide))
    for i in range(4):
        every_fourth = sums.type([4 * lane + i for lane in range(sums.type.count)])
        part = builder.shuffle_vector(products, wide(ir.Undefined), every_fourth)
        sums = builder.add(sums, part)
    return sums
