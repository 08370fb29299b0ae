"""Tiles of GGUF's types as signed bytes, which integer tensor cores multiply exactly.

A thread has, of a row and a fragment, four words of four codes: a word for each of its columns
(k8, pair), a code for each chunk. They become four registers of four bytes. Which columns and which
chunks share a register is what takes the fewest instructions:

    PAIRS    of four bits       a register for (k8, chunk is odd), a byte for (pair, chunk / 2)
    CHUNKS   bytes and entries  a register for (k8, pair), a byte for each chunk
    COLUMNS  of two bits        a register for each chunk, a byte for (k8, pair)

Integer tensor cores take columns in any order that both factors have. The chunks, whose scales
differ, are told apart by the other factor (`digits.py`), which has columns for each.

A zero in the middle of four or eight bits is a flipped bit, with the codes in a byte's upper bits,
`unit` times as large. Other zeros are left as an excess.
"""

from __future__ import annotations

from functools import cache as memoise

import triton
import triton.language as tl

from quire.kernels.gguf_tiles import TileType
from quire.kernels.triton.gguf.unpack import by_fragment, chunk_of, load_words, with_another

PAIRS: tl.constexpr = tl.constexpr(0)
CHUNKS: tl.constexpr = tl.constexpr(1)
COLUMNS: tl.constexpr = tl.constexpr(2)

_REGISTERS = 4  # of a row and a fragment
_REPEATED = 4  # times a register of one or two bits is given: for each of its words
_IN_BYTES = (0x5140, 0x7362)  # of two registers in turn: their first two bytes, or the others


def order_of(kind: TileType) -> int:
    if kind.bits == 8 or kind.table:
        return int(CHUNKS.value)
    return int((PAIRS if kind.bits == 4 else COLUMNS).value)


def is_signed(kind: TileType) -> bool:
    """Whether instructions take the zero off."""
    return kind.zero > 0 and kind.upper == 0


def unit(kind: TileType) -> int:
    """What codes count by as signed bytes."""
    return 16 if is_signed(kind) and kind.bits == 4 else 1


def rows_at_once(kind: TileType) -> int:
    """Single bits of both rows are one register."""
    return 2 if kind.upper == 1 else 1


@memoise
def byte_instructions(kind: TileType) -> tuple[str, str]:
    """From words, and registers of upper bits, to bytes; and constraints."""
    rows = rows_at_once(kind)
    outputs = rows * _REGISTERS
    words = kind.bits // 2 if kind.bits > 2 else _REPEATED
    first_upper = outputs + rows * words
    lines = [".reg .b32 v, w, u, m, p, q, t0, t1, t2, t3;"]
    for row in range(rows):
        lower = [f"${outputs + row * words + i}" for i in range(words)]
        out = [f"${rows * i + row}" for i in range(_REGISTERS)]
        if kind.table:
            lines += _entries(kind.table, lower, out)
        elif kind.bits == 8:
            lines += [
                f"xor.b32 {each}, {word}, 0x80808080;"
                for each, word in zip(out, lower, strict=True)
            ]
        elif kind.bits == 4:
            lines += _nibbles(kind, lower, out, f"${first_upper}", row)
        else:
            lines += _twos(kind, lower[0], out, f"${first_upper}", row)
    inputs = rows * (words + (_REPEATED if kind.upper else 0))
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=&r"] * outputs + ["r"] * inputs)


def _nibbles(kind: TileType, lower: list[str], out: list[str], upper: str, row: int) -> list[str]:
    if kind.upper == 2:  # a byte of each column
        lines = _above_of_twos(upper)
    elif kind.upper == 1:
        lines = _above_of_bits(upper, row)
    else:
        lines = []
    for k8, word in enumerate(lower):
        even, odd = out[2 * k8], out[2 * k8 + 1]
        if is_signed(kind):
            lines += [f"shl.b32 w, {word}, 4;"]
            lines += [f"lop3.b32 {even}, w, 0xf0f0f0f0, 0x80808080, 0x6a;"]
            lines += [f"lop3.b32 {odd}, {word}, 0xf0f0f0f0, 0x80808080, 0x6a;"]
            continue
        lines += [f"and.b32 {even}, {word}, 0x0f0f0f0f;"]
        lines += [f"shr.b32 w, {word}, 4;", f"and.b32 {odd}, w, 0x0f0f0f0f;"]
        if kind.upper:
            mask = "0x30303030" if kind.upper == 2 else "0x10101010"
            lines += [f"lop3.b32 {even}, t{k8}, {mask}, {even}, 0xea;"]
            lines += [f"shr.b32 w, t{k8}, {kind.upper};"]
            lines += [f"lop3.b32 {odd}, w, {mask}, {odd}, 0xea;"]
    return lines


def _above_of_twos(upper: str) -> list[str]:
    """To `t0` and `t1`, for either k8: the upper bits of even chunks from the fourth bit of a byte
    on, those of odd ones from the sixth."""
    lines = [f"shl.b32 v, {upper}, 4;"]
    return lines + [f"prmt.b32 t{k8}, v, {upper}, {_IN_BYTES[k8]};" for k8 in range(2)]


def _above_of_bits(upper: str, row: int) -> list[str]:
    """To `t0` and `t1`: the fifth bits of even chunks as the fourth bit, of odd ones as the fifth.

    A byte has the bits of two columns, of four chunks each: by how much they move differs.
    """
    lines = [f"shl.b32 u, {upper}, 4;", f"shl.b32 v, {upper}, 2;", f"shr.b32 w, {upper}, 2;"]
    lines += [f"prmt.b32 p, u, v, {_IN_BYTES[row]};", f"prmt.b32 q, {upper}, w, {_IN_BYTES[row]};"]
    return [*lines, "prmt.b32 t0, p, q, 0x5410;", "prmt.b32 t1, p, q, 0x7632;"]


def _twos(kind: TileType, word: str, out: list[str], upper: str, row: int) -> list[str]:
    lines: list[str] = []
    if kind.upper:  # of a column, four bits; to a byte each
        lines += [f"shr.b32 v, {upper}, 4;", f"prmt.b32 u, {upper}, v, {_IN_BYTES[row]};"]
    for chunk, target in enumerate(out):
        shifted = word
        if chunk:
            lines += [f"shr.b32 w, {word}, {2 * chunk};"]
            shifted = "w"
        lines += [f"and.b32 {target}, {shifted}, 0x03030303;"]
        if kind.upper:
            shifted = "u"
            if chunk != 2:
                lines += [f"shl.b32 w, u, {2 - chunk};" if chunk < 2 else "shr.b32 w, u, 1;"]
                shifted = "w"
            lines += [f"lop3.b32 {target}, {shifted}, 0x04040404, {target}, 0xea;"]
    return lines


def _entries(table: tuple[int, ...], lower: list[str], out: list[str]) -> list[str]:
    """An entry is found among eight by three bits of a code, and the fourth says which eight."""
    lines = ["mov.b32 v, 0x0000ff00;"]
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
def load_codes(
    codes,
    upper,
    number,
    live,
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
):
    """The lower and the upper bits of tiles PLACE behind these."""
    if BITS > 2:
        lower = load_words(codes, number, live, BITS, PLACE)
    else:
        lower = _load_registers(codes, number, live, PLACE, BITS)
    above = lower
    if UPPER > 0:
        above = _load_registers(upper, number, live, PLACE, UPPER)
    return lower, above


@triton.jit
def _load_registers(codes, number, live, PLACE: tl.constexpr, BITS: tl.constexpr):
    """One or two bits of codes as a thread has them, `[32, tiles, 2 fragments * rows at once]`."""
    count: tl.constexpr = 2 * BITS
    place = tl.arange(0, 32)[:, None, None] * count + tl.arange(0, count)[None, None, :]
    source = codes.to(tl.pointer_type(tl.int32)) + (number * (32 * count))[None, :, None] + place
    source += PLACE * 32 * count
    return tl.load(source, mask=live[None, :, None], other=0, eviction_policy="evict_first")


@triton.jit
def code_bytes(
    codes,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    FAST: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    """The left factor of a dot: `[tiles, 16, 128]`; of groups of 16, one for either fragment."""
    lower, above = codes
    if BITS > 2:
        lower = tl.permute(by_fragment(lower, BITS), (0, 1, 3, 2, 4))
    else:
        lower = _for_words(lower, BITS, FAST)
    if UPPER > 0:
        above = _for_words(above, UPPER, FAST)
    if FAST:
        if UPPER > 0:
            a, b, c, d = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [lower, above],
                dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4 * ROWS_AT_ONCE,
            )  # fmt: skip
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [lower],
                dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4 * ROWS_AT_ONCE,
            )  # fmt: skip
    else:
        a = _chunk(lower, above, 0, BITS, UPPER, ZERO, TABLE)
        b = _chunk(lower, above, 1, BITS, UPPER, ZERO, TABLE)
        c = _chunk(lower, above, 2, BITS, UPPER, ZERO, TABLE)
        d = _chunk(lower, above, 3, BITS, UPPER, ZERO, TABLE)
    found = tl.join(tl.join(a, b), tl.join(c, d))
    tiles: tl.constexpr = found.shape[0]
    found = tl.reshape(found, (tiles, 2, 8, 4, 2, 4, 2, 2))
    #  tile, fragment, g, t, row g or g + 8, byte, odd register, later register
    if GROUP == 32:
        found = tl.permute(found, (0, 4, 2, 1, 7, 3, 6, 5))
        result = with_another((), tl.reshape(found, (tiles, 16, 128)))
    else:
        first, second = tl.split(tl.permute(found, (0, 4, 2, 7, 3, 6, 5, 1)))
        result = with_another((), tl.reshape(first, (tiles, 16, 64)))
        result = with_another(result, tl.reshape(second, (tiles, 16, 64)))
    return result


@triton.jit
def _for_words(registers, BITS: tl.constexpr, FAST: tl.constexpr):
    """The register that has its bits for each word, or (not FAST) these themselves."""
    tiles: tl.constexpr = registers.shape[1]
    registers = tl.reshape(registers, (32, tiles, 2, BITS))
    registers = tl.permute(registers, (1, 2, 0, 3))[:, :, :, :, None]
    registers = tl.broadcast_to(registers, (tiles, 2, 32, 2, 4))
    if not FAST:
        row = tl.arange(0, 2)[:, None] * (16 * (2 - BITS))
        place = row + tl.arange(0, 4)[None, :] * (4 * BITS)
        registers = registers >> place[None, None, None, :, :]
    return registers


@triton.jit
def _chunk(
    lower,
    above,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
):
    """A byte for (k8, pair), of one chunk."""
    return chunk_of(lower, above, CHUNK, BITS, UPPER, ZERO, TABLE).to(tl.int8)
