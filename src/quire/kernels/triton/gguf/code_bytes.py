"""Tiles of GGUF's types as signed bytes, which integer tensor cores multiply exactly.

A thread has, of a row and a fragment, four words of four codes: a word for each of its columns
(k8, pair), a code for each chunk. They become four registers of four bytes. Which columns and which
chunks share a register is what takes the fewest instructions:

    PAIRS    of four bits       a register for (k8, chunk is odd), a byte for (pair, chunk / 2)
    CHUNKS   bytes and entries  a register for (k8, pair), a byte for each chunk

Integer tensor cores take columns in any order that both factors have. The chunks, whose scales
differ, are told apart by the other factor (`digits.py`), which has columns for each.

A zero in the middle is a flipped bit: four bits are in a byte's upper half then, and count 16 times
as much (`unit`).

Types whose codes have bits apart are not among these. Instructions take four words at once, in the
order of registers in Triton's layout; where two tensors have to agree on one, Triton chooses
another for other sizes: Q6_K was right with 2,816 columns and wrong with 768.
"""

from __future__ import annotations

from functools import cache as memoise

import triton
import triton.language as tl

from quire.kernels.gguf_tiles import TileType
from quire.kernels.triton.gguf.unpack import by_fragment, chunk_of

PAIRS: tl.constexpr = tl.constexpr(0)
CHUNKS: tl.constexpr = tl.constexpr(1)

_REGISTERS = 4  # of a row and a fragment


def order_of(kind: TileType) -> int:
    return int((CHUNKS if kind.bits == 8 or kind.table else PAIRS).value)


def unit(kind: TileType) -> int:
    """What codes count by as signed bytes."""
    return 16 if kind.zero and kind.bits == 4 else 1


@memoise
def byte_instructions(kind: TileType) -> tuple[str, str]:
    """From words to bytes; and constraints."""
    words = kind.bits // 2
    lower = [f"${_REGISTERS + i}" for i in range(words)]
    out = [f"${i}" for i in range(_REGISTERS)]
    if kind.table:
        lines = _entries(kind.table, lower, out)
    elif kind.bits == 8:
        pairs = zip(out, lower, strict=True)
        lines = [f"xor.b32 {each}, {word}, 0x80808080;" for each, word in pairs]
    else:
        lines = _nibbles(kind.zero > 0, lower, out)
    constraints = ",".join(["=&r"] * _REGISTERS + ["r"] * words)
    return "{\n" + "\n".join(lines) + "\n}", constraints


def _nibbles(signed: bool, lower: list[str], out: list[str]) -> list[str]:
    lines = [".reg .b32 w;"]
    for k8, word in enumerate(lower):
        even, odd = out[2 * k8], out[2 * k8 + 1]
        if signed:
            lines += [f"shl.b32 w, {word}, 4;"]
            lines += [f"lop3.b32 {even}, w, 0xf0f0f0f0, 0x80808080, 0x6a;"]
            lines += [f"lop3.b32 {odd}, {word}, 0xf0f0f0f0, 0x80808080, 0x6a;"]
        else:
            lines += [f"and.b32 {even}, {word}, 0x0f0f0f0f;"]
            lines += [f"shr.b32 w, {word}, 4;", f"and.b32 {odd}, w, 0x0f0f0f0f;"]
    return lines


def _entries(table: tuple[int, ...], lower: list[str], out: list[str]) -> list[str]:
    """An entry is found among eight by three bits of a code, and the fourth says which eight."""
    lines = [".reg .b32 v, w, u, m, p, q, t0, t1, t2, t3;", "mov.b32 v, 0x0000ff00;"]
    for i in range(4):
        quarter = bytes(entry & 255 for entry in table[4 * i : 4 * i + 4])
        lines += [f"mov.b32 t{i}, {int.from_bytes(quarter, 'little')};"]
    for k8, word in enumerate(lower):
        lines += [f"and.b32 w, {word}, 0x77777777;"]
        lines += [f"shr.b32 u, {word}, 3;", "and.b32 u, u, 0x11111111;"]
        for pair in range(2):
            if pair:
                lines += ["shr.b32 w, w, 16;", "shr.b32 u, u, 16;"]
            lines += ["prmt.b32 m, v, 0, u;", "prmt.b32 p, t0, t1, w;", "prmt.b32 q, t2, t3, w;"]
            lines += [f"lop3.b32 {out[2 * k8 + pair]}, m, q, p, 0xca;"]
    return lines


@triton.jit
def code_bytes(
    words,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    FAST: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    """The left factor of a dot: `[tiles, 16, 128]`."""
    words = tl.permute(by_fragment(words, BITS), (0, 1, 3, 2, 4))
    if FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [words],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        a = _chunk(words, 0, BITS, ZERO, TABLE)
        b = _chunk(words, 1, BITS, ZERO, TABLE)
        c = _chunk(words, 2, BITS, ZERO, TABLE)
        d = _chunk(words, 3, BITS, ZERO, TABLE)
    found = tl.join(tl.join(a, b), tl.join(c, d))
    tiles: tl.constexpr = found.shape[0]
    found = tl.reshape(found, (tiles, 2, 8, 4, 2, 4, 2, 2))
    #  tile, fragment, g, t, row g or g + 8, byte, odd register, later register
    return tl.reshape(tl.permute(found, (0, 4, 2, 1, 7, 3, 6, 5)), (tiles, 16, 128))


@triton.jit
def _chunk(words, CHUNK: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr):
    """A byte for (k8, pair), of one chunk."""
    return chunk_of(words, words, CHUNK, BITS, 0, ZERO, TABLE).to(tl.int8)
