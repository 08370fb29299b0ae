"""Tiles of MXFP4 codes that tensor cores multiply as they lie in registers (`hopper_few_fours.py`).

A tile is eight rows of a matrix and two steps of 32 elements (`kernels/four_bits.py`), which are
128 bytes of each row, and 64 columns of each quarter. Rows of a left factor are the eight rows in
the first step and in the second. A right factor has a column for each step and quarter, with x's
numbers there and zeros elsewhere, so that products of different scales end up in different sums:

                    columns of the right factor
    left factor     step 0: quarter 0, 1, 2, 3    step 1: quarter 0, 1, 2, 3
    rows, step 0    their sums                    nothing that is meant
    rows, step 1    nothing that is meant         their sums

A thread then scales four sums of a tile, whose codes are 64 in each thread. Codes are bfloat16
numbers divided by 2 ** 126 once their bits are masked; what x is multiplied by instead of one makes
half of that good, so that no product is too small for float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import four_bits
from quire.kernels.triton.experts.unpack import e2m1_parts

ROWS = tl.constexpr(8)  # of a tile, as many as tensor cores have columns
GROUP = tl.constexpr(four_bits.GROUP)  # columns of a quarter with one scale
STEP = tl.constexpr(2 * four_bits.GROUP)  # those that a tile has
_IN_INPUTS, _IN_SUMS = tl.constexpr(2.0**64), tl.constexpr(2.0**62)
_MASKED = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")


@triton.jit
def load_codes(matrix, scales, tile, first, height, QUARTER: tl.constexpr):
    """Codes `[32, tiles, 2, 4]`, by threads `4 g + t`: row `g`, pairs from `4 t` on; and words
    `[32, tiles]`, for sums of which `t` is the step and the upper half of quarters.

    Threads are the first dimension, then tiles, because Triton deals them out in this order.
    """
    groups: tl.constexpr = QUARTER // GROUP
    thread = tl.arange(0, 32)
    row = first + thread // 4
    group = 2 * tile
    source = matrix + group * (GROUP // 2)
    source = source[None, :] + (row * (QUARTER // 2) + thread % 4 * 4)[:, None]
    element = tl.arange(0, 2)[:, None] * (GROUP // 2) + tl.arange(0, 4)[None, :]
    source = source[:, :, None, None] + element[None, None, :, :]
    word = group[None, :] + (thread // 2 % 2)[:, None]
    word_source = scales[None, :] + (word * height + row[:, None])
    live = group[:, None] + tl.arange(0, 2)[None, :] < groups
    # Codes beyond may be anything, as x is 0 there.
    found = tl.load(source, mask=live[None, :, :, None], eviction_policy="evict_first")
    words = tl.load(word_source, mask=word < groups, other=0, eviction_policy="evict_first")
    return found, words


@triton.jit
def load_inputs(inputs, tile, live, COLUMNS: tl.constexpr, QUARTER: tl.constexpr):
    """`[32, tiles, 4]`, by threads `4 n + t`: the pairs from `4 t` on of column `n`."""
    thread = tl.arange(0, 32)
    quarter, half = thread // 4 % 4, thread // 16
    group = 2 * tile[None, :] + half[:, None]
    place = (group * (GROUP // 2) + (thread % 4 * 4)[:, None])[:, :, None] + tl.arange(0, 4)
    column = (quarter * (QUARTER // 2))[:, None, None] + place
    is_number = (place < QUARTER // 2) & (column < COLUMNS // 2) & live[None, :, None]
    return tl.load(inputs[None, :, None] + column, mask=is_number, other=0)


@triton.jit
def _halves(words):
    """A last dimension of two, each of 16 bits. Words are what loops carry: halves would be packed
    anew in each turn. Behind this join Triton gives a thread four neighbours of a factor's inner
    dimension, which is why pairs `2 i` and `2 i + 1` of a thread are side by side there."""
    return tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))


@triton.jit
def right_factors(pairs, FAST: tl.constexpr, dtype: tl.constexpr):
    """For each quarter, `[tiles, 32, 8]`: x's numbers in the columns of that quarter."""
    numbers = _halves(pairs).to(dtype, bitcast=True)
    return (
        _right_factor(numbers, 0, FAST),
        _right_factor(numbers, 1, FAST),
        _right_factor(numbers, 2, FAST),
        _right_factor(numbers, 3, FAST),
    )


@triton.jit
def _right_factor(numbers, WHICH: tl.constexpr, FAST: tl.constexpr):
    tiles: tl.constexpr = numbers.shape[1]
    is_its = (tl.arange(0, 32) // 4 % 4 == WHICH)[:, None, None, None]
    if FAST:
        factor = tl.where(is_its, _IN_INPUTS, 0.0).to(tl.bfloat16)
        numbers = tl.inline_asm_elementwise(
            _MASKED, "=r,r,r", [numbers, factor], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        numbers = tl.where(is_its, numbers, 0.0)
    numbers = tl.reshape(numbers, (8, 4, tiles, 2, 2, 2))
    #  n, t, tile, k16, pair of pairs, half
    return tl.reshape(tl.permute(numbers, (2, 3, 1, 4, 5, 0)), (tiles, 32, 8))


@triton.jit
def multiply(found, right, FAST: tl.constexpr, dtype: tl.constexpr):
    """Each tile's sums, `[tiles, step of rows, g, step, upper quarters, odd quarter]`."""
    codes, words = found
    tiles: tl.constexpr = words.shape[1]
    sums = tl.zeros((tiles, 16, 8), tl.float32)
    for quarter in tl.static_range(4):
        sums = tl.dot(_left_factor(codes, quarter, FAST, dtype), right[quarter], sums)
    words = words >> (tl.arange(0, 32) % 2 * 16)[:, None]  # the quarters of a thread's sums
    scales = tl.join(words << 23, words << 15) & 0x7F800000
    scales = tl.reshape(scales.to(tl.float32, bitcast=True), (8, 2, 2, tiles, 2))
    scales = tl.permute(scales, (3, 0, 1, 2, 4))[:, None, :, :, :, :]
    return tl.reshape(sums, (tiles, 2, 8, 2, 2, 2)) * scales


@triton.jit
def _left_factor(codes, QUARTER: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    tiles: tl.constexpr = codes.shape[1]
    numbers = tl.reshape(
        e2m1_parts(_halves(codes), QUARTER, FAST, dtype), (8, 4, tiles, 2, 2, 2, 2)
    )
    #  g, t, tile, step, k16, pair of pairs, half
    return tl.reshape(tl.permute(numbers, (2, 3, 0, 4, 1, 5, 6)), (tiles, 16, 32))


@triton.jit
def total_of(sums, HALVES: tl.constexpr, FAST: tl.constexpr):
    """The sums of rows over all tiles, steps and quarters, `[8]` or `[8, HALVES]`."""
    tiles: tl.constexpr = sums.shape[0]
    sums = tl.reshape(sums, (tiles, 2, 8, 2, 4, HALVES))
    step = tl.arange(0, 2)
    is_meant = step[:, None] == step[None, :]
    sums = tl.where(is_meant[None, :, None, :, None, None], sums, 0.0)
    sums = tl.reshape(tl.permute(sums, (2, 5, 0, 1, 3, 4)), (8, HALVES, tiles * 16))
    total = tl.sum(sums, 2)
    if FAST:
        total *= _IN_SUMS
    if HALVES == 1:
        total = tl.reshape(total, (8,))
    return total
