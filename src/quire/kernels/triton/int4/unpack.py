"""From tiles to fragments of tensor cores: where the codes lie, no thread needs another's."""

from __future__ import annotations

import triton
import triton.language as tl

# Of a tile: see `kernels/int4_tiles.py`.
WORDS = tl.constexpr(512)  # uint16 of a tile
COLUMNS = tl.constexpr(128)
CHUNK = tl.constexpr(32)
FRAGMENTS = tl.constexpr(2)  # of a chunk

# To the bits of a code come those of 128 in bfloat16 or 1024 in float16, whose last bit stands for
# one: code and bits together are the number 128 + code. Adding -128 - zero leaves it exact.
_BF16: tl.constexpr = tl.constexpr("""{
.reg .b32 w1, w2, w3;
shr.b32 w1, $4, 4;
shr.b32 w2, $4, 8;
shr.b32 w3, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, w1, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, w2, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, w3, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 $0, $0, $9;
add.rn.bf16x2 $1, $1, $10;
add.rn.bf16x2 $2, $2, $11;
add.rn.bf16x2 $3, $3, $12;
mul.rn.bf16x2 $0, $0, $5;
mul.rn.bf16x2 $1, $1, $6;
mul.rn.bf16x2 $2, $2, $7;
mul.rn.bf16x2 $3, $3, $8;
}""")
_F16: tl.constexpr = tl.constexpr(
    _BF16.value.replace("bf16", "f16").replace("43004300", "64006400")
)
_REGISTERS: tl.constexpr = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@triton.jit
def unpack(words, scales, zeros, FAST: tl.constexpr, dtype: tl.constexpr):
    """Tiles `[tiles, 2, 32, 2, 4]` to the four chunks `[tiles, 16, 32]` of their numbers.

    `scales` and `zeros` are four each, `[tiles, 1, 32, 2, 1]`. FAST: scales are of `dtype`.
    """
    s0, s1, s2, s3 = scales
    z0, z1, z2, z3 = zeros
    if FAST and dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            _BF16,
            _REGISTERS,
            [words, s0, s1, s2, s3, -128 - z0, -128 - z1, -128 - z2, -128 - z3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            _F16,
            _REGISTERS,
            [words, s0, s1, s2, s3, -1024 - z0, -1024 - z1, -1024 - z2, -1024 - z3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = _number(words, 0, s0, z0, dtype)
        b = _number(words, 4, s1, z1, dtype)
        c = _number(words, 8, s2, z2, dtype)
        d = _number(words, 12, s3, z3, dtype)
    return _fragments(a), _fragments(b), _fragments(c), _fragments(d)


@triton.jit
def _number(words, SHIFT: tl.constexpr, scale, zero, dtype: tl.constexpr):
    code = ((words.to(tl.int32) >> SHIFT) & 15).to(tl.float32)
    return ((code - zero.to(tl.float32)) * scale.to(tl.float32)).to(dtype)


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
    """Of tiles whose first group's scales (or zeros) begin at `of_groups`: all that they have."""
    groups: tl.constexpr = max(1, 128 // GROUP)
    thread = tl.arange(0, 32)[:, None, None, None]
    group = tl.arange(0, groups)[None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, :]
    source = of_groups[None, :, None, None] + (group * 16 + thread // 4 * 2 + half)
    return tl.load(source, mask=live[None, :, None, None], other=0)


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
