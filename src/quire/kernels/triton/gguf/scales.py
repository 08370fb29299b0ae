"""The scales and lows of 16 rows, as a thread of tensor cores needs them: those of rows g and g + 8
lie side by side, each with its low, and are one word."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.gguf.unpack import (
    BYTES,
    HALVES,
    NIBBLES,
    half_of,
    low_of,
    scale_of,
    with_another,
)

FIRST: tl.constexpr = tl.constexpr(2.0**23)  # from here on float32 has whole numbers alone
_SMALL = tl.constexpr(tuple(f"prmt.b32 $0, $1, 0x4b000000, 0x744{i};" for i in range(4)))


@triton.jit
def load_groups(scale, tile, live, GROUP: tl.constexpr, SCALES: tl.constexpr, LOWS: tl.constexpr):
    """Of tiles, by their numbers, the words of each group, a tensor `[tiles, 8]` each."""
    pairs: tl.constexpr = LOWS and SCALES != NIBBLES
    size: tl.constexpr = (2 if SCALES == HALVES else 1) * (4 if pairs else 2)
    groups: tl.constexpr = 128 // GROUP
    at = (tile * (groups * 8))[:, None] + tl.arange(0, 8)[None, :]
    found = ()
    for i in tl.static_range(groups):
        found = with_another(found, _load(scale, at + i * 8, live, size))
    return found


@triton.jit
def load_wide(wide, pair, live, WIDE: tl.constexpr, LOWS: tl.constexpr):
    """Of pairs of tiles, by their numbers, the words that they share."""
    at = (pair * 8)[:, None] + tl.arange(0, 8)[None, :]
    found = at
    if WIDE:
        found = _load(wide, at, live, 8 if LOWS else 4)
    return found


@triton.jit
def _load(words, at, live, SIZE: tl.constexpr):
    return tl.load(words_of(words, SIZE) + at, mask=live[:, None], other=0)


@triton.jit
def words_of(scales, SIZE: tl.constexpr):
    """As words of so many bytes."""
    if SIZE == 8:
        words = scales.to(tl.pointer_type(tl.int64))
    elif SIZE == 4:
        words = scales.to(tl.pointer_type(tl.int32))
    else:
        words = scales.to(tl.pointer_type(tl.int16))
    return words


@triton.jit
def group_scales(
    words,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Scales and lows `[tiles, 16]`, in float32: of K types without their `wide_factors`."""
    first, second, first_low, second_low = scales_of_rows(words, SCALES, SCALE_ZERO, LOWS, FAST)
    scales = _rows(first, second)
    lows = scales
    if LOWS:
        lows = _rows(first_low, second_low)
    return scales, lows


@triton.jit
def scales_of_rows(
    words,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    FAST: tl.constexpr,
):
    """The scales of rows g and g + 8, and their lows, each as words lie."""
    pairs: tl.constexpr = LOWS and SCALES != NIBBLES
    if SCALES == BYTES:
        first = _small(words, 0, FAST) - (FIRST + SCALE_ZERO)
        second = _small(words, 2 if LOWS else 1, FAST) - (FIRST + SCALE_ZERO)
        first_low, second_low = first, second
        if LOWS:
            first_low = _small(words, 1, FAST) - FIRST
            second_low = _small(words, 3, FAST) - FIRST
    else:
        bits: tl.constexpr = 16 if SCALES == HALVES else 8
        both = _part(words, 0, bits), _part(words, 2 if pairs else 1, bits)
        first = scale_of(both[0], SCALES, SCALE_ZERO)
        second = scale_of(both[1], SCALES, SCALE_ZERO)
        first_low, second_low = first, second
        if LOWS:
            if pairs:
                both = _part(words, 1, bits), _part(words, 3, bits)
            first_low, second_low = low_of(both[0], SCALES), low_of(both[1], SCALES)
    return first, second, first_low, second_low


@triton.jit
def _small(words, PLACE: tl.constexpr, FAST: tl.constexpr):
    """A byte as the last bits of a float32, `FIRST` and that number."""
    words = words.to(tl.int32)
    if FAST:
        bits = tl.inline_asm_elementwise(
            _SMALL[PLACE], "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = (words >> (8 * PLACE)) & 255 | 0x4B000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def wide_factors(words, LOWS: tl.constexpr):
    """What scales are multiplied by, and lows; `[tiles, 16]`."""
    first, second, first_low, second_low = wide_of_rows(words, LOWS)
    factors = _rows(first, second)
    of_lows = factors
    if LOWS:
        of_lows = _rows(first_low, second_low)
    return factors, of_lows


@triton.jit
def wide_of_rows(words, LOWS: tl.constexpr):
    """As `scales_of_rows`."""
    first, second = half_of(_part(words, 0, 16)), half_of(_part(words, 2 if LOWS else 1, 16))
    first_low, second_low = first, second
    if LOWS:
        first_low, second_low = -half_of(_part(words, 1, 16)), -half_of(_part(words, 3, 16))
    return first, second, first_low, second_low


@triton.jit
def _part(words, PLACE: tl.constexpr, BITS: tl.constexpr):
    if words.dtype == tl.int64:
        found = (words >> (32 * (PLACE // 2))).to(tl.int32) >> (PLACE % 2 * 16)
    else:
        found = words.to(tl.int32) >> (PLACE * BITS)
    return found & ((1 << BITS) - 1)


@triton.jit
def _rows(first, second):
    """Of rows g and of rows g + 8 to 16 rows."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, (first.shape[0], 16))
