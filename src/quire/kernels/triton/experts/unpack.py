"""From bytes of four-bit codes (`kernels/four_bits.py`) to the left factors of tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes of E2M1 codes to four bfloat16: the lower codes of each. Exponent and fraction of a
# code, put where bfloat16 has those of its smallest numbers, are the number divided by 2 ** 126.
# Scales are multiplied by most of that, and sums by the rest, so that no scale up to 2 ** 17 is too
# large for bfloat16, and none from 2 ** -109 on too small.
_E2M1 = """{
.reg .b32 p, q, m, n;
prmt.b32 p, $2, 0, 0x4140;
prmt.b32 q, $2, 0, 0x4342;
MAGNITUDE
SIGN
and.b32 m, m, 0x01C001C0;
and.b32 n, n, 0x01C001C0;
lop3.b32 m, p, 0x80008000, m, 0xEA;
lop3.b32 n, q, 0x80008000, n, 0xEA;
mul.rn.bf16x2 $0, m, $3;
mul.rn.bf16x2 $1, n, $4;
}"""


# Whole numbers, of which the bits of 128 in bfloat16 make 128 + code; less 128 and the zero, times
# the scale.
_WHOLE = """{
.reg .b32 p, q;
prmt.b32 p, $2, 0, 0x4140;
prmt.b32 q, $2, 0, 0x4342;
SHIFT
lop3.b32 p, p, 0x000f000f, 0x43004300, 0xEA;
lop3.b32 q, q, 0x000f000f, 0x43004300, 0xEA;
add.rn.bf16x2 p, p, $5;
add.rn.bf16x2 q, q, $6;
mul.rn.bf16x2 $0, p, $3;
mul.rn.bf16x2 $1, q, $4;
}"""
_LOWER_WHOLE = tl.constexpr(_WHOLE.replace("SHIFT", ""))
_UPPER_WHOLE = tl.constexpr(_WHOLE.replace("SHIFT", "shr.b32 p, p, 4;\nshr.b32 q, q, 4;"))


def _asm(magnitude: int, sign: int) -> tl.constexpr:
    """By how far to shift a byte's codes."""
    shifts = {
        "MAGNITUDE": f"shl.b32 m, p, {magnitude};\nshl.b32 n, q, {magnitude};",
        "SIGN": f"shl.b32 p, p, {sign};\nshl.b32 q, q, {sign};",
    }
    text = _E2M1
    for name, lines in shifts.items():
        text = text.replace(name, lines)
    return tl.constexpr(text)


_IN_SCALES, DIVISOR = tl.constexpr(110), tl.constexpr(65536.0)  # 126 and 0, less 16 and 16 more
_LOWER, _UPPER = _asm(6, 12), _asm(2, 8)


@triton.jit
def numbers_of(bytes, words, PLACE: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    """The lower or, from the third `PLACE` on, the upper codes of a tile of bytes, times two to the
    exponents at that place of each row's word; FAST: divided by `DIVISOR`."""
    exponents = (words >> (8 * PLACE)) & 255
    if FAST:
        bits = ((exponents + _IN_SCALES) << 7).to(tl.int16)
        scales = bits.to(tl.bfloat16, bitcast=True)[:, None]
        numbers = tl.inline_asm_elementwise(
            _UPPER if PLACE > 1 else _LOWER,
            "=r,=r,r,r,r",
            [bytes, scales.broadcast_to(bytes.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        code = (bytes >> 4 if PLACE > 1 else bytes & 15).to(tl.int32)
        exponent, fraction = (code >> 1) & 3, code & 1
        quarters = tl.where(exponent == 0, fraction * 2, (fraction + 2) << exponent)
        numbers = tl.where(code >= 8, -quarters, quarters).to(tl.float32) * 0.25
        numbers = (numbers * tl.exp2(exponents.to(tl.float32) - 127)[:, None]).to(dtype)
    return numbers


@triton.jit
def whole_numbers(
    bytes,
    words,
    zeros,
    UPPER: tl.constexpr,
    SCALE: tl.constexpr,
    FAST: tl.constexpr,
    dtype: tl.constexpr,
):
    """Lower or upper codes less zeros, times scales of the type `SCALE`, both halves of words."""
    shift: tl.constexpr = 16 if UPPER else 0
    scales = (words >> shift).to(tl.int16).to(SCALE, bitcast=True)[:, None]
    zero = ((zeros >> shift) & 255)[:, None]
    if FAST:
        offsets = (-128 - zero).to(tl.bfloat16)
        numbers = tl.inline_asm_elementwise(
            _UPPER_WHOLE if UPPER else _LOWER_WHOLE,
            "=r,=r,r,r,r,r,r",
            [bytes, scales.broadcast_to(bytes.shape), offsets.broadcast_to(bytes.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        code = (bytes >> 4 if UPPER else bytes & 15).to(tl.int32)
        numbers = ((code - zero).to(tl.float32) * scales.to(tl.float32)).to(dtype)
    return numbers


@triton.jit
def unpacked(
    bytes,
    words,
    zeros,
    PLACE: tl.constexpr,
    SCALE: tl.constexpr,
    FAST: tl.constexpr,
    dtype: tl.constexpr,
):
    """The numbers of a tile of bytes at a place of its words: lower, lower, upper, upper."""
    if SCALE is None:
        numbers = numbers_of(bytes, words, PLACE, FAST, dtype)
    else:
        numbers = whole_numbers(bytes, words, zeros, PLACE > 1, SCALE, FAST, dtype)
    return numbers
