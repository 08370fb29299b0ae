"""Tiles of a four-bit matrix on their way: copied to shared memory some steps ahead, then unpacked.

A step's tiles, one for each warp, are one of each of several blocks of 16 rows, one below another.
A thread unpacks the 16 bytes that it copied itself. In Gluon, which says where each number lies; it
cannot be interpreted.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from quire.kernels.triton.gluon_names import copy_async

TILES: gl.constexpr = gl.constexpr(4)  # of a step


class Settings(NamedTuple):
    """What kernels are compiled for."""

    group: int
    has_zeros: bool


@gluon.jit
def make_ring(STEPS: gl.constexpr, matrix, SETTINGS: gl.constexpr):
    """Shared memory for so many steps: codes, scales and zeros."""
    scale_dtype: gl.constexpr = matrix[1].dtype.element_ty
    zero_dtype: gl.constexpr = matrix[2].dtype.element_ty
    groups: gl.constexpr = _groups(SETTINGS.group)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    codes = gl.allocate_shared_memory(gl.int16, [STEPS, TILES, 2, 256], plain)
    scales = gl.allocate_shared_memory(scale_dtype, [STEPS, TILES, 16 * groups], flat)
    zeros = gl.allocate_shared_memory(zero_dtype, [STEPS, TILES, 16 * groups], flat)
    return codes, scales, zeros


@gluon.jit
def fetch(
    ring,
    matrix,
    step,
    block,
    tile,
    last_tile,
    blocks,
    columns,
    SETTINGS: gl.constexpr,
):
    """Begin to copy a step's tiles: this one of each block from this on."""
    words, scale, zero = matrix
    GROUP: gl.constexpr = SETTINGS.group
    codes, scales, zeros = ring
    tiles: gl.constexpr = codes.shape[1]
    warps: gl.constexpr = gl.num_warps()
    three: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [warps, 1, 1], [2, 0, 1])
    number = gl.arange(0, tiles, layout=gl.SliceLayout(1, gl.SliceLayout(2, three)))
    fragment = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, three)))
    word = gl.arange(0, 256, layout=gl.SliceLayout(0, gl.SliceLayout(1, three)))
    its_block, its_tile, live = _which(number, block, tile, last_tile, blocks)
    start = (its_block.to(gl.int64) * (columns // 128) + its_tile) * 512
    source = words + start[:, None, None] + (fragment[None, :, None] * 256 + word[None, None, :])
    slot = step % codes.shape[0]
    copy_async(codes.index(slot), source, mask=live[:, None, None], eviction_policy="evict_first")
    _fetch_of_groups(scales.index(slot), scale, block, tile, last_tile, blocks, columns, GROUP)
    if SETTINGS.has_zeros:
        _fetch_of_groups(zeros.index(slot), zero, block, tile, last_tile, blocks, columns, GROUP)
    async_copy.commit_group()


@gluon.jit
def _fetch_of_groups(
    to,
    of_groups,
    block,
    tile,
    last_tile,
    blocks,
    columns,
    GROUP: gl.constexpr,
):
    warps: gl.constexpr = gl.num_warps()
    vector: gl.constexpr = 16 // (to.dtype.primitive_bitwidth // 8)
    two: gl.constexpr = gl.BlockedLayout([1, vector], [1, 32], [warps, 1], [1, 0])
    number = gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, two))
    element = gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, two))
    its_block, its_tile, live = _which(number, block, tile, last_tile, blocks)
    start = (its_block * (columns // GROUP) + its_tile * 128 // GROUP) * 16
    source = of_groups + start[:, None] + element[None, :]
    copy_async(to, source, mask=live[:, None])


@gluon.jit
def _which(number, block, tile, last_tile, blocks):
    """Of a step's tiles that there are not, others take the places: all in memory are numbers."""
    its_block = gl.minimum(block + number, blocks - 1)
    its_tile = tile + number * 0
    return its_block, its_tile, its_tile < last_tile


@gluon.jit
def take(ring, step, SETTINGS: gl.constexpr):
    """A step's codes, and of each of the four chunks the scales and what is added to a code."""
    codes, scales, zeros = ring
    GROUP: gl.constexpr = SETTINGS.group
    tiles: gl.constexpr = codes.shape[1]
    warps: gl.constexpr = gl.num_warps()
    three: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [warps, 1, 1], [2, 0, 1])
    slot = step % codes.shape[0]
    found = codes.index(slot).load(three)
    found = gl.convert_layout(gl.reshape(found, [tiles, 2, 8, 4, 2, 4]), _tile_layout(warps))
    its_scales = _by_chunk(scales.index(slot), GROUP)
    dtype: gl.constexpr = scales.dtype
    if SETTINGS.has_zeros:
        z0, z1, z2, z3 = _by_chunk(zeros.index(slot), GROUP)
        lows = (_less(z0, dtype), _less(z1, dtype), _less(z2, dtype), _less(z3, dtype))
    else:
        low = gl.full([1, 1, 1, 1, 1, 1], -8 - _one(dtype), dtype, _tile_layout(warps))
        lows = (low, low, low, low)
    return found, its_scales, lows


@gluon.jit
def _less(zeros, dtype: gl.constexpr):
    return -_one(dtype) - zeros.to(dtype)


@gluon.jit
def _by_chunk(of_groups, GROUP: gl.constexpr):
    warps: gl.constexpr = gl.num_warps()
    tiles: gl.constexpr = of_groups.shape[0]
    groups: gl.constexpr = _groups(GROUP)
    found = of_groups.load(_group_layout(warps, tiles, groups))
    if groups == 1:
        a = _over_tile(found, tiles)
        result = (a, a, a, a)
    elif groups == 2:
        found = gl.permute(gl.reshape(found, [tiles, 2, 16]), [0, 2, 1])
        first, second = gl.split(found)
        a = _over_tile(first, tiles)
        b = _over_tile(second, tiles)
        result = (a, a, b, b)
    else:
        found = gl.permute(gl.reshape(found, [tiles, 2, 2, 16]), [0, 3, 1, 2])
        even, odd = gl.split(found)
        a, c = gl.split(even)
        b, d = gl.split(odd)
        result = (
            _over_tile(a, tiles), _over_tile(b, tiles), _over_tile(c, tiles), _over_tile(d, tiles),
        )  # fmt: skip
    return result


@gluon.jit
def _over_tile(of_group, TILES: gl.constexpr):
    warps: gl.constexpr = gl.num_warps()
    wide = gl.reshape(of_group, [TILES, 1, 8, 1, 2, 1])
    return gl.convert_layout(wide, _tile_layout(warps))


@gluon.jit
def numbers_of(taken, CHUNK: gl.constexpr, dtype: gl.constexpr, SETTINGS: gl.constexpr):
    """The numbers `[tiles, 16, 32]` of a chunk, where tensor cores take a left factor from."""
    codes, scales, lows = taken
    tiles: gl.constexpr = codes.shape[0]
    asm: gl.constexpr = _asm(CHUNK, dtype)
    given = [codes, scales[CHUNK], lows[CHUNK]]
    if dtype == gl.bfloat16:
        found = gl.inline_asm_elementwise(
            asm, "=r,r,r,r", given, dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        found = gl.inline_asm_elementwise(
            asm, "=r,r,r,r", given, dtype=gl.float16, is_pure=True, pack=2
        )
    found = gl.reshape(found, [tiles, 2, 8, 4, 2, 2, 2])
    #  tile, fragment, g, t, half, k8, pair
    return gl.reshape(gl.permute(found, [0, 4, 2, 1, 5, 3, 6]), [tiles, 16, 32])


@gluon.constexpr_function
def _asm(chunk, dtype):
    kind = "f16" if dtype == gl.float16 else "bf16"
    bits = "0x64006400" if dtype == gl.float16 else "0x43004300"
    return f"""{{
.reg .b32 w;
shr.b32 w, $1, {4 * chunk};
lop3.b32 w, w, 0x000f000f, {bits}, 0xea;
add.rn.{kind}x2 w, w, $3;
mul.rn.{kind}x2 $0, w, $2;
}}"""


@gluon.constexpr_function
def _one(dtype):
    """The number whose last bit stands for one: see `unpack.py`."""
    return 1024 if dtype == gl.float16 else 128


@gluon.constexpr_function
def _groups(group):
    return max(1, 128 // group)


@gluon.constexpr_function
def _tile_layout(warps):
    return gl.BlockedLayout(
        [1, 2, 1, 1, 2, 4], [1, 1, 8, 4, 1, 1], [warps, 1, 1, 1, 1, 1], [5, 4, 1, 3, 2, 0]
    )


@gluon.constexpr_function
def _group_layout(warps, tiles, groups):
    """Thread `4 g + t` has rows `g` and `g + 8`, of all groups."""
    registers = [[0, 1]] + [[0, 16 << i] for i in range(groups.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]]
    of_warps = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    more = [[warps << i, 0] for i in range((tiles // warps).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers + more, lanes, of_warps, [], [tiles, 16 * groups])
