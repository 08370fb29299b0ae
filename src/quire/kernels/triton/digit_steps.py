"""The steps in which numbers of x count as two digits in base 256.

They are the power of two that the largest number of some columns asks for, so that an error is at
most 2^-14 of that largest number. What is not finite makes the steps infinite, and so the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BITS: tl.constexpr = tl.constexpr(13)  # of the largest number's steps, at least
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
_LEAST: tl.constexpr = tl.constexpr(32 << 23)  # exponent: numbers below 2^-95 are nothing
BASE: tl.constexpr = tl.constexpr(256)
# Near it, the last bits of a float32 are a whole number.
ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2**23)

_WIDE = tl.constexpr("""
shl.b32 $0, $2, 16;
and.b32 $1, $2, 0xffff0000;
""")


@triton.jit
def widened(numbers, FAST: tl.constexpr):
    """In float32."""
    if FAST and numbers.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            _WIDE, "=&r,=&r,r", [numbers], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        wide = numbers.to(tl.float32)
    return wide


@triton.jit
def size_bits(x):
    """As numbers do without their signs, these ascend; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def steps_of(largest):
    """Of the largest number's `size_bits`: how many steps make 1, and what a step is worth."""
    power = tl.maximum(largest & _EXPONENT, _LEAST)
    steps = (254 << 23) - (power - (_BITS << 23))  # by exponents
    worth = power.to(tl.float32, bitcast=True) * (2.0**-_BITS)
    return steps.to(tl.float32, bitcast=True), worth
