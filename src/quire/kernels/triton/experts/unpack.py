"""From four-bit codes (`kernels/four_bits.py`) to the left factors of tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.four_bits import E2M1_BITS

# The bits of an E2M1 code, put where bfloat16 has those of its smallest numbers, are the number
# divided by 2 ** 126. Scales are multiplied by most of that, and sums by the rest, so that no scale
# up to 2 ** 17 is too large for bfloat16, and none from 2 ** -109 on too small.
IN_SCALES, DIVISOR = tl.constexpr(110), tl.constexpr(65536.0)


# The bits of two codes, masked, in `m`.
_E2M1 = (
    "and.b32 m, $1, 0x81C081C0;",
    "shl.b32 m, $1, 3;\nand.b32 m, m, 0x81C081C0;",
    "shl.b32 m, $1, 6;\nand.b32 m, m, 0x81C081C0;",
    "shr.b32 m, $1, 7;\nand.b32 m, m, 0x00D800D8;\nmul.lo.u32 m, m, 0x821;\n"
    "and.b32 m, m, 0x81C081C0;",
)


def _e2m1(lines: str, last: str) -> tl.constexpr:
    return tl.constexpr("{\n.reg .b32 m;\n" + lines + f"\n{last}\n}}")


FIRST, SECOND, THIRD, FOURTH = (_e2m1(lines, "mul.rn.bf16x2 $0, m, $2;") for lines in _E2M1)
_FIRST_PART, _SECOND_PART, _THIRD_PART, _FOURTH_PART = (
    _e2m1(lines, "mov.b32 $0, m;") for lines in _E2M1
)
_PLACES = tl.constexpr(E2M1_BITS)


def _whole(shift: int) -> tl.constexpr:
    """The bits of 128 in bfloat16 make 128 + code; less 128 and the zero, times the scale."""
    return tl.constexpr(f"""{{
.reg .b32 m;
shr.b32 m, $1, {shift};
lop3.b32 m, m, 0x000f000f, 0x43004300, 0xEA;
add.rn.bf16x2 m, m, $3;
mul.rn.bf16x2 $0, m, $2;
}}""")


_WHOLE_0, _WHOLE_1, _WHOLE_2, _WHOLE_3 = (_whole(shift) for shift in (0, 4, 8, 12))


@triton.jit
def e2m1_numbers(codes, words, QUARTER: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    """Those of a quarter, times two to its exponents in each row's word; FAST: divided by
    `DIVISOR`."""
    exponents = (words >> (8 * QUARTER)) & 255
    if FAST:
        bits = ((exponents + IN_SCALES) << 7).to(tl.int16)
        scales = bits.to(tl.bfloat16, bitcast=True)[:, None]
        asm: tl.constexpr = (
            FIRST
            if QUARTER == 0
            else (SECOND if QUARTER == 1 else (THIRD if QUARTER == 2 else FOURTH))
        )
        numbers = tl.inline_asm_elementwise(
            asm,
            "=r,r,r",
            [codes, scales.broadcast_to(codes.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        numbers = _plain_e2m1(codes, QUARTER)
        numbers = (numbers * tl.exp2(exponents.to(tl.float32) - 127)[:, None]).to(dtype)
    return numbers


@triton.jit
def e2m1_parts(codes, QUARTER: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    """Those of a quarter, without their exponents; FAST: divided by 2 ** 126."""
    if FAST:
        asm: tl.constexpr = (
            _FIRST_PART
            if QUARTER == 0
            else (_SECOND_PART if QUARTER == 1 else (_THIRD_PART if QUARTER == 2 else _FOURTH_PART))
        )
        numbers = tl.inline_asm_elementwise(
            asm, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        numbers = _plain_e2m1(codes, QUARTER).to(dtype)
    return numbers


@triton.jit
def _plain_e2m1(codes, QUARTER: tl.constexpr):
    found = codes.to(tl.int32)
    exponent = ((found >> _PLACES[QUARTER][1]) & 1) * 2 + ((found >> _PLACES[QUARTER][2]) & 1)
    fraction = (found >> _PLACES[QUARTER][3]) & 1
    quarters = tl.where(exponent == 0, fraction * 2, (fraction + 2) << exponent)
    is_negative = ((found >> _PLACES[QUARTER][0]) & 1) != 0
    return tl.where(is_negative, -quarters, quarters).to(tl.float32) * 0.25


@triton.jit
def whole_numbers(
    codes,
    words,
    zeros,
    QUARTER: tl.constexpr,
    SCALE: tl.constexpr,
    FAST: tl.constexpr,
    dtype: tl.constexpr,
):
    """Those of a quarter less zeros, times scales of the type `SCALE`: halves of words."""
    shift: tl.constexpr = QUARTER % 2 * 16
    scales = (words >> shift).to(tl.int16).to(SCALE, bitcast=True)[:, None]
    zero = ((zeros >> shift) & 255)[:, None]
    if FAST:
        offsets = (-128 - zero).to(tl.bfloat16)
        asm: tl.constexpr = (
            _WHOLE_0
            if QUARTER == 0
            else (_WHOLE_1 if QUARTER == 1 else (_WHOLE_2 if QUARTER == 2 else _WHOLE_3))
        )
        numbers = tl.inline_asm_elementwise(
            asm,
            "=r,r,r,r",
            [codes, scales.broadcast_to(codes.shape), offsets.broadcast_to(codes.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        code = (codes.to(tl.int32) >> (4 * QUARTER)) & 15
        numbers = ((code - zero).to(tl.float32) * scales.to(tl.float32)).to(dtype)
    return numbers
