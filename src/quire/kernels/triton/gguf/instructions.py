"""From codes to numbers of 16 bits, two a register, by instructions that GPUs have since Ampere.

To the bits of a code come those of 128 in bfloat16 or 1024 in float16, whose last bit stands for
one: code and bits together are the number 128 + code, and adding -128 - zero leaves it exact.
bfloat16 has no room for eight bits there: the highest makes 128 of 256 in a number of its own, and
the difference is exact. An entry of a table is two bytes, found by four codes at once.

A thread gives any four words, each of four codes, one of each chunk, and as many words of upper
bits, of which the lower ones count. Results are those of the first chunk, of the second, …
"""

from __future__ import annotations

from functools import cache as memoise

import torch

from quire.kernels.gguf_tiles import TileType

OUTPUTS = 8  # registers: two for each chunk
CONSTRAINTS = ",".join(["=&r"] * OUTPUTS)
_IN_HALVES = (0x4140, 0x4342)  # bytes 0 and 1, or 2 and 3, each below a byte of zeros


@memoise
def unpacking(kind: TileType, dtype: torch.dtype, is_exact: bool) -> tuple[str, str]:
    """Instructions for this type and their constraints; unless `is_exact`, `excess` is left."""
    words = {8: 4, 4: 2, 2: 1}[kind.bits]
    inputs = words + {2: 1, 1: 2, 0: 0}[kind.upper]
    if kind.table:
        lines = _of_table(kind.table, dtype)
    elif kind.bits == 8:
        lines = _of_bytes(dtype)
    else:
        lines = _of_bits(kind, dtype, is_exact)
    return "{\n" + "\n".join(lines) + "\n}", CONSTRAINTS + ",r" * inputs


def excess(kind: TileType, dtype: torch.dtype) -> int:
    """How much numbers are too large that are not exact."""
    return 0 if kind.table or kind.bits == 8 else _magic(dtype)[1] + kind.zero


def _of_bits(kind: TileType, dtype: torch.dtype, is_exact: bool) -> list[str]:
    name, first, one = _magic(dtype)
    less = _pair(-first - kind.zero, dtype)
    bits, upper = kind.bits, kind.upper
    above = OUTPUTS + (2 if bits == 4 else 1)
    lines = [".reg .b32 w, u, v, one, less;"]
    if is_exact:
        lines += [f"mov.b32 one, {one};", f"mov.b32 less, {less};"]
    for word in range(2):
        codes = f"${OUTPUTS + word}"
        if bits == 2:
            codes = "v"
            lines += [f"prmt.b32 v, ${OUTPUTS}, 0, {_IN_HALVES[word]};"]
        if upper == 2:
            lines += [f"prmt.b32 u, ${above}, 0, {_IN_HALVES[word]};"]
        elif upper == 1:
            lines += [f"mov.b32 u, ${above + word};"]
        for chunk in range(4):
            out = f"${2 * chunk + word}"
            lines += [f"shr.b32 w, {codes}, {bits * chunk};"]
            lines += [f"lop3.b32 {out}, w, {_twice((1 << bits) - 1)}, {_pair(first, dtype)}, 0xea;"]
            if upper:
                left = bits - upper * chunk
                shift = f"shl.b32 w, u, {left};" if left > 0 else f"shr.b32 w, u, {-left};"
                mask = _twice((1 << upper) - 1 << bits)
                lines += [shift, f"lop3.b32 {out}, w, {mask}, {out}, 0xea;"]
            if is_exact:
                lines += [f"fma.rn.{name} {out}, {out}, one, less;"]
    return lines


def _of_bytes(dtype: torch.dtype) -> list[str]:
    name, first, one = _magic(dtype)
    bits, less = _pair(first, dtype), _pair(-first - 128, dtype)
    lines = [".reg .b32 w, u, one, less;", f"mov.b32 less, {less};"]
    lines += [f"mov.b32 one, {_pair(-1, dtype) if dtype == torch.bfloat16 else one};"]
    for word in range(2):
        pair = f"${OUTPUTS + 2 * word}, ${OUTPUTS + 2 * word + 1}"
        for chunk in range(4):
            out = f"${2 * chunk + word}"
            lines += [f"prmt.b32 w, {pair}, {0x4400 + 0x1111 * chunk};"]
            if dtype == torch.bfloat16:
                lines += [f"lop3.b32 {out}, w, 0x007f007f, {bits}, 0xea;"]
                lines += [f"lop3.b32 u, w, 0x00800080, {bits}, 0xae;"]
                lines += [f"fma.rn.{name} {out}, u, one, {out};"]
            else:
                lines += [f"lop3.b32 {out}, w, 0x00ff00ff, {bits}, 0xea;"]
                lines += [f"fma.rn.{name} {out}, {out}, one, less;"]
    return lines


def _of_table(table: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    entries = [_bits(entry, dtype) for entry in table]
    bytes_of = [[entry & 255 for entry in entries], [entry >> 8 for entry in entries]]
    lines = [".reg .b32 w, u, m, p, q, t0, t1, t2, t3, l0, h0, l1, h1;"]
    for word in range(2):
        lines += [f"and.b32 w, ${OUTPUTS + word}, 0x77777777;"]
        lines += [f"shr.b32 u, ${OUTPUTS + word}, 3;", "and.b32 u, u, 0x11111111;"]
        for number in range(2):  # of the pair
            if number:
                lines += ["shr.b32 w, w, 16;", "shr.b32 u, u, 16;"]
            lines += ["mov.b32 t0, 0x0000ff00;", "prmt.b32 m, t0, 0, u;"]  # where code >= 8
            for byte, target in enumerate("lh"):
                for i in range(4):
                    quarter = bytes(bytes_of[byte][4 * i : 4 * i + 4])
                    lines += [f"mov.b32 t{i}, {int.from_bytes(quarter, 'little')};"]
                lines += ["prmt.b32 p, t0, t1, w;", "prmt.b32 q, t2, t3, w;"]
                lines += [f"lop3.b32 {target}{number}, m, q, p, 0xca;"]
        for two, selector in enumerate((0x5140, 0x7362)):  # chunks 0 and 1, then 2 and 3
            lines += [f"prmt.b32 p, l0, h0, {selector};", f"prmt.b32 q, l1, h1, {selector};"]
            lines += [f"prmt.b32 ${4 * two + word}, p, q, 0x5410;"]
            lines += [f"prmt.b32 ${4 * two + 2 + word}, p, q, 0x7632;"]
    return lines


def _magic(dtype: torch.dtype) -> tuple[str, int, str]:
    """The type's name, the number whose last bit stands for one, and 1."""
    if dtype == torch.bfloat16:
        return "bf16x2", 128, _pair(1, dtype)
    return "f16x2", 1024, _pair(1, dtype)


def _bits(number: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(number, dtype=dtype).view(torch.int16).item()) & 0xFFFF


def _pair(number: float, dtype: torch.dtype) -> str:
    return _twice(_bits(number, dtype))


def _twice(half: int) -> str:
    return f"0x{half:04x}{half:04x}"
