"""From words of codes to weights in 16 bits, two a register, chunk by chunk.

A weight is rounded once, from float32. Up to six bits of a code go into bfloat16 together with the
bits of 128, whose last bit stands for one; with another 16 bits of zeros that is 128 + code in
float32, exactly. It is multiplied by the scale, and what is added makes up for the 128. Eight bits,
which are a code or an entry of a table, go into the float32 whose last bit stands for one, 2^23.

Operands are those of two numbers each, of which the second is the first again where both are
multiplied by it, or lie in one word.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

IN_BF16 = gl.constexpr(128)  # what a code has in excess, unless it is of eight bits
_IN_BYTES = gl.constexpr(128)  # likewise an entry of a table, or a code of eight bits

# Which bytes of a word are two pairs' of two bits each, and what to add for the second; likewise
# for single bits, and what to add for t and for half. Bytes 0 to 3 are those, 4 to 7 are zeros.
PAIR_BYTES, NEXT_PAIR = gl.constexpr(0x4140), gl.constexpr(0x0202)
SINGLE_BYTE, NEXT_T, NEXT_HALF = gl.constexpr(0x4440), gl.constexpr(1), gl.constexpr(2)

# A byte of a word as a float32, 2^23 and that number: FLOAT_BYTE, and which byte it is, in `$2`.
BYTE_AS_FLOAT = gl.constexpr("prmt.b32 $0, $1, 0x4b000000, $2;")
FLOAT_BYTE = gl.constexpr(0x7440)


@gluon.constexpr_function
def chosen_pair(shift: int) -> str:
    """Two bytes of a word, each in 16 bits, this far up: `$2` says which."""
    return f"{{\n.reg .b32 w;\nprmt.b32 w, $1, 0, $2;\nshl.b32 $0, w, {shift};\n}}"


@gluon.constexpr_function
def chosen_bits(shift: int) -> str:
    """The two halves of a byte of a word likewise, four bits each."""
    factor = (1 << shift) | (1 << shift + 12)
    return f"{{\n.reg .b32 w;\nprmt.b32 w, $1, 0, $2;\nmul.lo.u32 $0, w, {factor};\n}}"


@gluon.constexpr_function
def of_codes(chunk: int, bits: int, upper: int, kind: str) -> str:
    """Of a word of pairs (twice), one of upper bits from `bits` on, scales, and what is added."""
    names = ["$1", "$3", "$5", "$7"] if upper else ["$1", "", "$3", "$5"]
    codes, above, scale, low = names
    mask = _twice((1 << bits) - 1)
    lines = [".reg .b32 w, u, a, b;"]
    lines += [f"shr.b32 w, {codes}, {bits * chunk};"]
    lines += [f"lop3.b32 w, w, {mask}, 0x43004300, 0xea;"]
    if upper:
        lines += [f"shr.b32 u, {above}, {upper * chunk};"]
        lines += [f"lop3.b32 w, u, {_twice((1 << upper) - 1 << bits)}, w, 0xea;"]
    lines += ["shl.b32 a, w, 16;", "and.b32 b, w, 0xffff0000;"]
    lines += [f"fma.rn.f32 a, a, {scale}, {low};", f"fma.rn.f32 b, b, {scale}, {low};"]
    return "{\n" + "\n".join([*lines, f"cvt.rn.{kind}x2.f32 $0, b, a;"]) + "\n}"


@gluon.constexpr_function
def of_bytes(chunk: int, kind: str) -> str:
    """Of two words, each of a number's four chunks, and scales."""
    lines = [".reg .b32 a, b;"]
    for name, word in (("a", "$1"), ("b", "$2")):
        lines += [f"prmt.b32 {name}, {word}, 0x4b000000, {0x7440 + chunk:#x};"]
        lines += [f"add.rn.f32 {name}, {name}, 0fCB000080;"]
        lines += [f"mul.rn.f32 {name}, {name}, $3;"]
    return "{\n" + "\n".join([*lines, f"cvt.rn.{kind}x2.f32 $0, b, a;"]) + "\n}"


@gluon.constexpr_function
def entries(table: tuple[int, ...]) -> str:
    """From a word of pairs (twice) to two words for `of_bytes`: a byte finds its entry among four
    of four, by three bits of a code, and the fourth says which of two entries found it is."""
    lines = [".reg .b32 w, u, m, p, q, t0, t1, t2, t3;"]
    for i in range(4):
        quarter = bytes(entry + _IN_BYTES.value for entry in table[4 * i : 4 * i + 4])
        lines += [f"mov.b32 t{i}, {int.from_bytes(quarter, 'little')};"]
    lines += ["and.b32 w, $2, 0x77777777;"]
    lines += ["shr.b32 u, $2, 3;", "and.b32 u, u, 0x11111111;"]
    for number in range(2):
        if number:
            lines += ["shr.b32 w, w, 16;", "shr.b32 u, u, 16;"]
        lines += ["mov.b32 m, 0x0000ff00;", "prmt.b32 m, m, 0, u;"]
        lines += ["prmt.b32 p, t0, t1, w;", "prmt.b32 q, t2, t3, w;"]
        lines += [f"lop3.b32 ${number}, m, q, p, 0xca;"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _twice(half: int) -> str:
    return f"0x{half:04x}{half:04x}"
