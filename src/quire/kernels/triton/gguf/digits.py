"""A row of x as the right factor of products of integers: two digits for each number.

Thread `4 g + t` of a warp has column g of that factor: of chunk `g / 2` the digit `g % 2`, the
upper one first. Its bytes for other chunks are zeros, so that one product has the sums of all
chunks, and thread `4 g + t` finds both digits of chunk t. A thread reads what it needs of x, and
128 columns share their steps (`digit_steps.py`): one maximum of a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.digit_steps import ROUNDER, size_bits, steps_of, widened
from quire.kernels.triton.gguf.code_bytes import PAIRS

# By order: from four float32, of (k8, pair), whose last bytes are digits, to a thread's registers
# of bytes. Each number comes with `selectors`, which are the same for all.
_OF_PAIRS = """{
.reg .b32 u;
prmt.b32 u, $4, $5, $8;
and.b32 $0, u, $12;
and.b32 $1, u, $16;
prmt.b32 u, $6, $7, $8;
and.b32 $2, u, $12;
and.b32 $3, u, $16;
}"""
_OF_CHUNKS = """{
prmt.b32 $0, $4, 0, $8;
prmt.b32 $1, $5, 0, $8;
prmt.b32 $2, $6, 0, $8;
prmt.b32 $3, $7, 0, $8;
}"""
ASM = tl.constexpr((_OF_PAIRS, _OF_CHUNKS))
CONSTRAINTS = tl.constexpr(
    tuple("=&r,=&r,=&r,=&r" + ",r" * (4 + 4 * selectors) for selectors in (3, 1))
)


@triton.jit
def digits(
    x,
    start,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    ORDER: tl.constexpr,
    FAST: tl.constexpr,
):
    """Of a row of x, the columns of tiles from `start` on: the right factor of a dot, `[tiles, 128,
    8]`; and what a step is worth, `[tiles]`."""
    thread = tl.arange(0, 32)[:, None, None]
    first = tl.arange(0, WARPS)[None, :, None] * 128 + thread // 8 * 32
    source = x + (first + thread % 4 * 8 + tl.arange(0, 8)[None, None, :]) + start * 128
    if COLUMNS % (WARPS * AHEAD * 128) == 0:
        numbers = tl.load(source)
    else:  # of columns that there are not, zeros; what there is are whole chunks
        numbers = tl.load(source, mask=first < COLUMNS - start * 128, other=0.0)
    wide = widened(numbers, FAST)
    steps, worth = steps_of(tl.max(_largest(wide, FAST), 0))
    is_upper = thread // 4 % 2 == 0
    # With 128 added, the upper digit is what it is if the lower one counts from -128 on.
    rounded = wide * steps[None, :, None] + tl.where(is_upper, ROUNDER + 128.0, ROUNDER)
    found = _own_bytes(tl.reshape(rounded, (32, WARPS, 2, 4)), ORDER, FAST)
    found = tl.reshape(found, (8, 4, WARPS, 2, 4, 2, 2))
    #  g, t, tile, fragment, byte, odd register, later register
    found = tl.permute(found, (2, 3, 6, 1, 5, 4, 0))
    return tl.reshape(found, (WARPS, 128, 8)), worth


@triton.jit
def _largest(wide, FAST: tl.constexpr):
    """The `size_bits` of the largest of a thread's numbers."""
    if FAST:
        largest = tl.reduce(tl.abs(wide), 2, _larger).to(tl.int32, bitcast=True)
    else:
        largest = tl.max(size_bits(wide), 2)
    return largest


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _own_bytes(rounded, ORDER: tl.constexpr, FAST: tl.constexpr):
    """A thread's registers of bytes: `[32, tiles, 2, byte, odd register, later register]`."""
    thread = tl.arange(0, 32)[:, None, None, None]
    lower, chunk = thread // 4 % 2, thread // 8
    if not FAST:
        bits = rounded.to(tl.int32, bitcast=True)
        digit = tl.where(lower == 0, bits >> 8, bits).to(tl.int8)
        a, b = tl.where(chunk == 0, digit, 0), tl.where(chunk == 1, digit, 0)
        c, d = tl.where(chunk == 2, digit, 0), tl.where(chunk == 3, digit, 0)
    else:
        chosen = selectors(chunk, lower, ORDER)
        if ORDER == PAIRS:
            a, b, c, d = tl.inline_asm_elementwise(
                ASM[ORDER], CONSTRAINTS[ORDER], [rounded, chosen[0], chosen[1], chosen[2]],
                dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                ASM[ORDER], CONSTRAINTS[ORDER], [rounded, chosen[0]],
                dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
            )  # fmt: skip
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def selectors(chunk, lower, ORDER: tl.constexpr):
    """What `ASM` takes for a thread of this chunk, and of the lower digit or the upper (1 or 0):
    where digits are, first, and then which bits of each register are not zeros."""
    if ORDER == PAIRS:
        mask = 0x00FF00FF << (chunk // 2 * 8)
        return 0x5511 - lower * 0x1111, mask * (1 - chunk % 2), mask * (chunk % 2)
    else:  # where there is no digit, a byte of zeros
        place = chunk * 4
        return ((0x4444 & ~(0xF << place)) | (1 - lower) << place,)
