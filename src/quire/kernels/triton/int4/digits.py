"""Both factors of a four-bit product as bytes, which integer tensor cores multiply exactly.

A code less the middle one is a signed number of four bits. In the upper half of a byte it is 16
times that number: a mask and a flipped bit make four bytes of a register's eight codes, where
16-bit numbers take three instructions a pair.

A number of x becomes two bytes, its digits in base 256, of which either may be negative. They count
in steps that 128 columns share (`digit_steps.py`); bfloat16 numbers down to 1/64 of the largest
have no error. Both digits are columns of the right factor, which would be idle otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.digit_steps import ROUNDER, size_bits, steps_of, widened

# To four bytes in the upper halves (the first chunk's codes and the third's) and four more (the
# second's and the fourth's), for either of two registers.
_SIGNED = tl.constexpr("""{
.reg .b32 u0, u1;
shl.b32 u0, $4, 4;
shl.b32 u1, $5, 4;
lop3.b32 $0, u0, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $1, $4, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $2, u1, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $3, $5, 0xf0f0f0f0, 0x80808080, 0x6a;
}""")
_BOTH = tl.constexpr("""{
.reg .b32 u0, u1;
prmt.b32 u0, $2, $3, 0x5140;
prmt.b32 u1, $4, $5, 0x5140;
prmt.b32 $0, u0, u1, 0x7632;
prmt.b32 $1, u0, u1, 0x5410;
xor.b32 $1, $1, 0x80808080;
}""")

# With 128 added, the upper digit is what it is if the lower one counts from -128 on.
_ROUNDER: tl.constexpr = tl.constexpr(ROUNDER + 128)
MIDDLE: tl.constexpr = tl.constexpr(8)
UNIT: tl.constexpr = tl.constexpr(16)  # of signed codes


@triton.jit
def signed_codes(words, FAST: tl.constexpr):
    """Tiles `[tiles, 2, 32, 2, 4]` to `[tiles, 16, 128]` bytes of 16 times a code less the middle.

    The columns are in an order of their own, which `digits` has, too. FAST: by instructions that a
    GPU has; those take a thread's four words at once, of which none is another's.
    """
    tiles: tl.constexpr = words.shape[0]
    if FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            _SIGNED, "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
        found = tl.join(tl.join(a, b), tl.join(c, d))
        found = tl.reshape(found, (tiles, 2, 8, 4, 2, 2, 2, 2, 2))
        #  tile, fragment, g, t, half, pair, later chunk, odd chunk, k8
        found = tl.permute(found, (0, 4, 2, 7, 8, 3, 1, 5, 6))
    else:
        even = tl.join(_signed_code(words, 0), _signed_code(words, 8))
        odd = tl.join(_signed_code(words, 4), _signed_code(words, 12))
        found = tl.reshape(tl.join(even, odd), (tiles, 2, 8, 4, 2, 2, 2, 2, 2))
        #  tile, fragment, g, t, half, k8, pair, later chunk, odd chunk
        found = tl.permute(found, (0, 4, 2, 8, 5, 3, 1, 6, 7))
    return tl.reshape(found, (tiles, 16, 128))


@triton.jit
def _signed_code(words, SHIFT: tl.constexpr):
    return ((((words.to(tl.int32) >> SHIFT) & 15) - MIDDLE) * UNIT).to(tl.int8)


@triton.jit
def digits(
    x,
    x_stride,
    rows,
    first,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
    FAST: tl.constexpr,
):
    """x's numbers from tile `first` on as a right factor `[TILES, 128, 8]`, a row's digits side by
    side; of each tile and row what a step is worth, and (SUMMED) how many there are, `[TILES, 4]`.

    ROWS: 1, 2 or 4. In place of rows that there are not, others are read.
    """
    row = tl.minimum(tl.arange(0, ROWS), rows - 1)
    tile = first + tl.arange(0, TILES)
    source = x + row[:, None, None] * x_stride
    source += (tile * 128)[None, :, None] + tl.arange(0, 64)[None, None, :]
    live = (tile * 128 < COLUMNS)[None, :, None]
    # The two numbers whose codes one mask finds in a word are 64 columns apart.
    early = widened(tl.load(source, mask=live, other=0.0), FAST)
    late = widened(tl.load(source + 64, mask=live, other=0.0), FAST)
    largest = tl.max(tl.maximum(size_bits(early), size_bits(late)), 2)
    steps, worth = steps_of(largest)
    scaled = tl.join(early, late) * steps[:, :, None, None]
    rounded = scaled + _ROUNDER
    if FAST:
        high, low = tl.inline_asm_elementwise(
            _BOTH, "=&r,=&r,r,r,r,r", [rounded], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        bits = rounded.to(tl.int32, bitcast=True)
        high, low = (bits >> 8).to(tl.int8), (bits ^ 0x80).to(tl.int8)
    found = tl.reshape(tl.join(high, low), (ROWS, TILES, 2, 2, 2, 4, 2, 2, 2))
    #  row, tile, odd chunk, fragment, k8, t, pair, later chunk, digit
    found = tl.permute(found, (1, 0, 8, 2, 4, 5, 3, 6, 7))
    found = _repeated(tl.reshape(found, (TILES, 2 * ROWS, 128)), 8)
    worth *= 1.0 / UNIT
    count = worth
    if SUMMED:
        count = tl.sum(tl.sum(rounded - _ROUNDER, 3), 2) * UNIT
    return tl.permute(found, (0, 2, 1)), _of_tiles(worth), _of_tiles(count)


@triton.jit
def _of_tiles(of_rows):
    """`[rows, tiles]` to `[tiles, 4]`."""
    found = _repeated(tl.trans(of_rows)[:, :, None], 4)
    return tl.reshape(found, (found.shape[0], 4))


@triton.jit
def _repeated(x, LENGTH: tl.constexpr):
    """So often that the middle one of three dimensions is so long."""
    rows: tl.constexpr = x.shape[1]
    if rows < LENGTH:
        many: tl.constexpr = (x.shape[0], LENGTH // rows, rows, x.shape[2])
        x = tl.broadcast_to(x[:, None, :, :], many)
        x = tl.reshape(x, (x.shape[0], LENGTH, x.shape[3]))
    return x
