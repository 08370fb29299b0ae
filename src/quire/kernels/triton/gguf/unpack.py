"""Tiles of GGUF's types in registers, as fragments of tensor cores."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.gguf_tiles import TileType
from quire.kernels.triton.gguf.instructions import excess, unpacking

HALVES: tl.constexpr = tl.constexpr(0)
BYTES: tl.constexpr = tl.constexpr(1)
NIBBLES: tl.constexpr = tl.constexpr(2)
EXPONENTS: tl.constexpr = tl.constexpr(3)


def of_kind(
    kind: TileType, dtype: torch.dtype, fast: bool, is_exact: bool = True
) -> dict[str, Any]:
    """What kernels are compiled for. FAST: by instructions that GPUs have since Ampere; EXCESS: how
    much numbers are too large then, unless they are to be exact."""
    asm, constraints = unpacking(kind, dtype, is_exact)
    return {
        "BITS": kind.bits,
        "UPPER": kind.upper,
        "ZERO": kind.zero,
        "GROUP": kind.group,
        "SCALES": kind.scales,
        "SCALE_ZERO": kind.scale_zero,
        "LOWS": kind.has_lows,
        "WIDE": kind.scales in (1, 2),
        "TABLE": kind.table,
        "FAST": fast,
        "EXCESS": 0 if is_exact or not fast else excess(kind, dtype),
        "ASM": asm,
        "CONSTRAINTS": constraints,
    }


@triton.jit
def load_codes(codes, upper, number, live, BITS: tl.constexpr, UPPER: tl.constexpr):
    """The lower and the upper bits of tiles, by their numbers, as they lie in memory."""
    lower = load_words(codes, number, live, BITS)
    above = lower
    if UPPER > 0:
        above = load_words(upper, number, live, UPPER)
    return lower, above


@triton.jit
def load_words(codes, number, live, BITS: tl.constexpr, PLACE: tl.constexpr = 0):
    """Of tiles PLACE behind these, in words of four codes; those of single bits are of 16: were
    they bytes, Triton would lay out left factors for bytes, which codes are not."""
    parts: tl.constexpr = 4 if BITS == 8 else (2 if BITS == 4 else 1)
    size: tl.constexpr = (128 if BITS == 1 else 512) // parts
    if BITS == 8:
        words = codes.to(tl.pointer_type(tl.int32))
    elif BITS == 2:
        words = codes
    else:
        words = codes.to(tl.pointer_type(tl.int16))
    place = tl.arange(0, parts)[None, :, None] * size + tl.arange(0, size)[None, None, :]
    source = words + (number * (parts * size))[:, None, None] + place + PLACE * parts * size
    return tl.load(source, mask=live[:, None, None], other=0, eviction_policy="evict_first")


@triton.jit
def by_fragment(words, BITS: tl.constexpr):
    """`[tiles, 2 fragments, row g or g + 8, 32 threads, 4 words of four codes]`"""
    tiles: tl.constexpr = words.shape[0]
    if BITS == 8:
        found = tl.reshape(words, (tiles, 2, 2, 32, 4))
    elif BITS == 4:
        found = tl.permute(tl.reshape(words, (tiles, 2, 32, 2, 4)), (0, 1, 3, 2, 4))
    elif BITS == 2:
        found = tl.permute(tl.reshape(words, (tiles, 32, 2, 2, 4)), (0, 2, 3, 1, 4))
    else:  # to four words, the lowest bits of each; a join would look like bytes to Triton, too
        shift = (tl.arange(0, 4) * 4).to(tl.int16)[None, None, None, None, :]
        words = tl.reshape(words, (tiles, 32, 2, 2))[:, :, :, :, None] >> shift
        found = tl.permute(words, (0, 2, 3, 1, 4))
    return found


@triton.jit
def chunks_of(
    codes,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    FAST: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The four chunks `[tiles, 2 fragments, 16, 16]` of codes less zeros, or of a table's entries,
    all of which are exact."""
    lower, above = codes
    lower = by_fragment(lower, BITS)
    if UPPER > 0:
        above = by_fragment(above, UPPER)
    if FAST:
        if UPPER > 0:
            a, b, c, d = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [lower, above],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [lower],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=4,
            )  # fmt: skip
        a = a.to(dtype, bitcast=True)
        b = b.to(dtype, bitcast=True)
        c = c.to(dtype, bitcast=True)
        d = d.to(dtype, bitcast=True)
    else:
        a = chunk_of(lower, above, 0, BITS, UPPER, ZERO, TABLE).to(dtype)
        b = chunk_of(lower, above, 1, BITS, UPPER, ZERO, TABLE).to(dtype)
        c = chunk_of(lower, above, 2, BITS, UPPER, ZERO, TABLE).to(dtype)
        d = chunk_of(lower, above, 3, BITS, UPPER, ZERO, TABLE).to(dtype)
    return _fragments(a), _fragments(b), _fragments(c), _fragments(d)


@triton.jit
def chunk_of(
    lower,
    above,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The numbers of one chunk, in float32."""
    code = (lower.to(tl.int32) >> (BITS * CHUNK)) & ((1 << BITS) - 1)
    upper = above.to(tl.int32) >> (UPPER * CHUNK)
    if UPPER > 0:
        code |= (upper & ((1 << UPPER) - 1)) << BITS
    return number_of(code, ZERO, TABLE)


@triton.jit
def number_of(code, ZERO: tl.constexpr, TABLE: tl.constexpr):
    """A code less the zero, or an entry of the table."""
    if len(TABLE) > 0:
        number = tl.zeros(code.shape, tl.float32)
        for i in tl.static_range(len(TABLE)):
            number = tl.where(code == i, TABLE[i] + 0.0, number)
    else:
        number = (code - ZERO).to(tl.float32)
    return number


@triton.jit
def _fragments(numbers):
    tiles: tl.constexpr = numbers.shape[0]
    numbers = tl.reshape(numbers, (tiles, 2, 2, 8, 4, 2, 2))
    #  tile, fragment, half, g, t, k8, pair
    return tl.reshape(tl.permute(numbers, (0, 1, 2, 3, 5, 4, 6)), (tiles, 2, 16, 16))


@triton.jit
def scale_of(found, SCALES: tl.constexpr, SCALE_ZERO: tl.constexpr):
    """A scale as it is stored, in float32: of K types without the factor of 256 columns."""
    if SCALES == HALVES:
        result = half_of(found)
    elif SCALES == EXPONENTS:
        bits = tl.where(found == 0, 0x00400000, found << 23)
        result = bits.to(tl.float32, bitcast=True) * 0.5
    elif SCALES == NIBBLES:
        result = _small(found & 15, 0)
    else:
        result = _small(found, SCALE_ZERO)
    return result


@triton.jit
def low_of(found, SCALES: tl.constexpr):
    if SCALES == HALVES:
        result = half_of(found)
    elif SCALES == NIBBLES:
        result = _small(found >> 4, 0)
    else:
        result = _small(found, 0)
    return result


@triton.jit
def half_of(found):
    """A float16 out of the lower bits, in float32."""
    return found.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _small(number, ZERO: tl.constexpr):
    """A byte as a float32: as the last bits of 2^23, which is faster than what converts."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def by_group(chunks, GROUP: tl.constexpr):
    """Fragments `[tiles, 2, 16, 16]` of four chunks, as left factors of each group."""
    result = ()
    for i in tl.static_range(4):
        if GROUP == 32:
            result = with_another(result, _joined(chunks[i]))
        else:
            first, second = tl.split(tl.permute(chunks[i], (0, 2, 3, 1)))
            result = with_another(with_another(result, first), second)
    return result


@triton.jit
def _joined(chunk):
    return tl.reshape(tl.permute(chunk, (0, 2, 1, 3)), (chunk.shape[0], 16, 32))


@triton.jit
def with_another(some, another):
    return some + (another,)  # noqa: RUF005 (Triton has no other way)
