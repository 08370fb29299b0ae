"""From tiles to fragments of tensor cores: where the codes lie, no thread needs another's."""

from __future__ import annotations

import triton
import triton.language as tl

# To the bits of a code come those of 128 in bfloat16 or 1024 in float16, whose last bit stands for
# one: code and bits together are the number 128 + code. Adding -128 - zero leaves it exact.
_CODES = """
shr.b32 w1, $4, 4;
shr.b32 w2, $4, 8;
shr.b32 w3, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, w1, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, w2, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, w3, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 $0, $0, $5;
add.rn.bf16x2 $1, $1, $6;
add.rn.bf16x2 $2, $2, $7;
add.rn.bf16x2 $3, $3, $8;
"""
_SCALED = """
mul.rn.bf16x2 $0, $0, $9;
mul.rn.bf16x2 $1, $1, $10;
mul.rn.bf16x2 $2, $2, $11;
mul.rn.bf16x2 $3, $3, $12;
"""


def _asm(lines: str, is_bf16: bool) -> tl.constexpr:
    if not is_bf16:
        lines = lines.replace("bf16", "f16").replace("43004300", "64006400")
    return tl.constexpr("{\n.reg .b32 w1, w2, w3;" + lines + "}")


_CODES_BF16, _CODES_F16 = (_asm(_CODES, is_bf16) for is_bf16 in (True, False))
_SCALED_BF16, _SCALED_F16 = (_asm(_CODES + _SCALED, is_bf16) for is_bf16 in (True, False))
_OF_CODES = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")
_OF_SCALED = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@triton.jit
def less_zeros(words, zeros, FAST: tl.constexpr, dtype: tl.constexpr):
    """Tiles `[tiles, 2, 32, 2, 4]` to the four chunks `[tiles, 16, 32]` of codes less zeros.

    `zeros` are four, `[tiles, 1, 32, 2, 1]`. FAST: by instructions that Hopper GPUs have.
    """
    z0, z1, z2, z3 = zeros
    if FAST and dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            _CODES_BF16, _OF_CODES,
            [words, -128 - z0, -128 - z1, -128 - z2, -128 - z3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            _CODES_F16, _OF_CODES,
            [words, -1024 - z0, -1024 - z1, -1024 - z2, -1024 - z3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a = _code(words, 0, z0).to(dtype)
        b = _code(words, 4, z1).to(dtype)
        c = _code(words, 8, z2).to(dtype)
        d = _code(words, 12, z3).to(dtype)
    return _fragments(a), _fragments(b), _fragments(c), _fragments(d)


@triton.jit
def unpack(words, scales, zeros, FAST: tl.constexpr, dtype: tl.constexpr):
    """As `less_zeros`, times the scales, of which there are four as well, and rounded.

    FAST: scales are of `dtype`.
    """
    s0, s1, s2, s3 = scales
    z0, z1, z2, z3 = zeros
    if FAST and dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            _SCALED_BF16, _OF_SCALED,
            [words, -128 - z0, -128 - z1, -128 - z2, -128 - z3, s0, s1, s2, s3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            _SCALED_F16, _OF_SCALED,
            [words, -1024 - z0, -1024 - z1, -1024 - z2, -1024 - z3, s0, s1, s2, s3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a = (_code(words, 0, z0) * s0.to(tl.float32)).to(dtype)
        b = (_code(words, 4, z1) * s1.to(tl.float32)).to(dtype)
        c = (_code(words, 8, z2) * s2.to(tl.float32)).to(dtype)
        d = (_code(words, 12, z3) * s3.to(tl.float32)).to(dtype)
    return _fragments(a), _fragments(b), _fragments(c), _fragments(d)


@triton.jit
def _code(words, SHIFT: tl.constexpr, zero):
    return ((words.to(tl.int32) >> SHIFT) & 15).to(tl.float32) - zero.to(tl.float32)


@triton.jit
def _fragments(numbers):
    tiles: tl.constexpr = numbers.shape[0]
    numbers = tl.reshape(numbers, (tiles, 2, 8, 4, 2, 2, 2))
    #  tile, fragment, g, t, half, k8, pair
    return tl.reshape(tl.permute(numbers, (0, 4, 2, 1, 5, 3, 6)), (tiles, 16, 32))


@triton.jit
def load_words(tiles, live):
    """The tiles that begin at `tiles`, of which those that are not `live` are zeros."""
    fragment = tl.arange(0, 2)[None, :, None] * 256
    words = tl.arange(0, 256)[None, None, :]
    source = tiles[:, None, None] + (fragment + words)
    found = tl.load(source, mask=live[:, None, None], other=0, eviction_policy="evict_first")
    return tl.reshape(found, (tiles.shape[0], 2, 32, 2, 4))


@triton.jit
def load_by_chunk(of_groups, live, GROUP: tl.constexpr):
    """Of tiles whose first group's scales begin at `of_groups`: all that they have."""
    groups: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    thread = tl.arange(0, 32)[:, None, None, None]
    group = tl.arange(0, groups)[None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, :]
    source = of_groups[None, :, None, None] + (group * 16 + thread // 4 * 2 + half)
    return tl.load(source, mask=live[None, :, None, None], other=0)


@triton.jit
def load_zeros(zero, first, live, GROUP: tl.constexpr):
    """As `load_by_chunk`, of bytes, the first groups' from `first` on, which are read in pairs.

    Were they read one by one, Triton would lay out left factors for bytes, which codes are not.
    """
    groups: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    thread = tl.arange(0, 32)[:, None, None, None]
    group = tl.arange(0, groups)[None, None, :, None]
    source = zero + first[None, :, None, None] // 2 + (group * 8 + thread // 4)
    pair = tl.load(source, mask=live[None, :, None, None], other=0)
    return (pair >> (tl.arange(0, 2) * 8)[None, None, None, :].to(tl.int16)) & 255


@triton.jit
def by_chunk(found):
    """What `load_by_chunk` found for each of the four chunks, to be broadcast over a tile."""
    groups: tl.constexpr = found.shape[2]
    tiles: tl.constexpr = found.shape[1]
    if groups == 1:
        first = tl.permute(tl.reshape(found, (32, tiles, 2)), (1, 0, 2))
        second, third, fourth = first, first, first
    elif groups == 2:
        first, third = tl.split(tl.permute(found, (1, 0, 3, 2)))
        second, fourth = first, third
    else:
        split = tl.reshape(tl.permute(found, (1, 0, 3, 2)), (tiles, 32, 2, 2, 2))
        even, odd = tl.split(split)  # chunks 0 and 2, and 1 and 3
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
    return (
        first[:, None, :, :, None],
        second[:, None, :, :, None],
        third[:, None, :, :, None],
        fourth[:, None, :, :, None],
    )


@triton.jit
def zeros_by_chunk(found, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """The zeros of each chunk; where there are none, the middle code."""
    if ZEROS:
        result = by_chunk(found.to(dtype))
    else:
        middle = tl.full((1, 1, 1, 1, 1), 8.0, dtype)
        result = (middle, middle, middle, middle)
    return result


@triton.jit
def load_numbers(
    words,
    scale,
    zero,
    block,
    tile,
    columns,
    live,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    FAST: tl.constexpr,
    dtype: tl.constexpr,
):
    """The four chunks of tiles: of one of each block of 16 rows, or of several of one block."""
    codes = load_words(words + (block.to(tl.int64) * (columns // 128) + tile) * 512, live)
    first = (block * (columns // GROUP) + tile * 128 // GROUP) * 16
    scales = load_by_chunk(scale + first, live, GROUP)
    zeros = scales
    if ZEROS:
        zeros = load_zeros(zero, first, live, GROUP)
    return unpack(codes, by_chunk(scales), zeros_by_chunk(zeros, ZEROS, dtype), FAST, dtype)
