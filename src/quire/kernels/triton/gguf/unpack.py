"""Tiles of GGUF's types in registers, as fragments of tensor cores."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.gguf_tiles import TileType
from quire.kernels.triton.gguf.instructions import unpacking

HALVES: tl.constexpr = tl.constexpr(0)
BYTES: tl.constexpr = tl.constexpr(1)
NIBBLES: tl.constexpr = tl.constexpr(2)
EXPONENTS: tl.constexpr = tl.constexpr(3)


def of_kind(kind: TileType, dtype: torch.dtype, fast: bool) -> dict[str, Any]:
    """What kernels are compiled for. FAST: by instructions that GPUs have since Ampere."""
    asm, constraints = unpacking(kind, dtype)
    return {
        "BITS": kind.bits,
        "UPPER": kind.upper,
        "ZERO": kind.zero,
        "GROUP": kind.group,
        "SCALES": kind.scales,
        "SCALE_ZERO": kind.scale_zero,
        "LOWS": kind.has_lows,
        "TABLE": kind.table,
        "FAST": fast,
        "ASM": asm,
        "CONSTRAINTS": constraints,
    }


@triton.jit
def load_codes(codes, upper, number, live, BITS: tl.constexpr, UPPER: tl.constexpr):
    """Of tiles, by their numbers: `[tiles, 2 fragments, 32 threads, 8 words of four codes]`."""
    if BITS == 8:
        lower = _load(codes.to(tl.pointer_type(tl.int32)), number, live, 8)
    elif BITS == 4:
        lower = _load(codes.to(tl.pointer_type(tl.int16)), number, live, 8)
    else:
        lower = _load(codes, number, live, 8)
    above = lower
    if UPPER == 2:
        above = _load(upper, number, live, 8)
    elif UPPER == 1:
        above = _load(upper, number, live, 4)  # a byte has those of two words
    return lower, above


@triton.jit
def _load(words, number, live, OF_THREAD: tl.constexpr):
    fragment = tl.arange(0, 2)[None, :, None] * (32 * OF_THREAD)
    place = fragment + tl.arange(0, 32 * OF_THREAD)[None, None, :]
    source = words + (number * (64 * OF_THREAD))[:, None, None] + place
    found = tl.load(source, mask=live[:, None, None], other=0, eviction_policy="evict_first")
    return tl.reshape(found, (number.shape[0], 2, 32, OF_THREAD))


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
    if UPPER == 1:
        above = tl.reshape(tl.join(above, above), lower.shape)
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
        a = _chunk(lower, above, 0, BITS, UPPER, ZERO, TABLE).to(dtype)
        b = _chunk(lower, above, 1, BITS, UPPER, ZERO, TABLE).to(dtype)
        c = _chunk(lower, above, 2, BITS, UPPER, ZERO, TABLE).to(dtype)
        d = _chunk(lower, above, 3, BITS, UPPER, ZERO, TABLE).to(dtype)
    return _fragments(a), _fragments(b), _fragments(c), _fragments(d)


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
    code = (lower.to(tl.int32) >> (BITS * CHUNK)) & ((1 << BITS) - 1)
    upper = above.to(tl.int32) >> (UPPER * CHUNK)
    if UPPER == 1:
        upper = upper >> (tl.arange(0, 8) % 2 * 4)[None, None, None, :]
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
    numbers = tl.reshape(numbers, (tiles, 2, 8, 4, 2, 2, 2))
    #  tile, fragment, g, t, half, k8, pair
    return tl.reshape(tl.permute(numbers, (0, 1, 4, 2, 5, 3, 6)), (tiles, 2, 16, 16))


@triton.jit
def load_scales(
    scale, low, at, live, SCALES: tl.constexpr, SCALE_ZERO: tl.constexpr, LOWS: tl.constexpr
):
    """Those of groups, in float32: of K types without what 256 columns share."""
    if SCALES == HALVES:
        scales = tl.load(scale + at, mask=live, other=0.0).to(tl.float32)
    else:
        found = tl.load(scale + at, mask=live, other=0).to(tl.int32)
        if SCALES == EXPONENTS:
            bits = tl.where(found == 0, 0x00400000, found << 23)
            scales = bits.to(tl.float32, bitcast=True) * 0.5
        elif SCALES == NIBBLES:
            scales = (found & 15).to(tl.float32)
        else:
            scales = _small(found, SCALE_ZERO)
    lows = scales
    if LOWS:
        if SCALES == HALVES:
            lows = tl.load(low + at, mask=live, other=0.0).to(tl.float32)
        elif SCALES == NIBBLES:
            lows = _small(found >> 4, 0)
        else:
            lows = _small(tl.load(low + at, mask=live, other=0).to(tl.int32), 0)
    return scales, lows


@triton.jit
def _small(number, ZERO: tl.constexpr):
    """A byte as a float32: as the last bits of 2^23, which is faster than what converts."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def load_wide(wide_scale, wide_low, at, live, SCALES: tl.constexpr, LOWS: tl.constexpr):
    """What 256 columns share: factors of scales and of lows. Others are of types without them."""
    factor = tl.full(at.shape, 1.0, tl.float32)
    low_factor = factor
    is_wide: tl.constexpr = (SCALES == BYTES) | (SCALES == NIBBLES)
    if is_wide:
        factor = tl.load(wide_scale + at, mask=live, other=0.0).to(tl.float32)
        if LOWS:
            low_factor = -tl.load(wide_low + at, mask=live, other=0.0).to(tl.float32)
    return factor, low_factor
