"""Some hundreds of rows times a matrix of one of GGUF's types, on GPUs that are no Hopper.

The weights are the left factor: each is unpacked once, in registers, for a block of x's rows, which
are the columns of the product. It is rounded once, to x's type, as a matrix of numbers would be.

Where there are fewer programs than a GPU runs at once, several share the columns of the matrix,
and what they found is added by another kernel.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gguf_tiles import GGUFTiles
from quire.kernels.triton.gguf.scales import group_scales, load_groups, load_wide, wide_factors
from quire.kernels.triton.gguf.unpack import by_group, chunks_of, load_codes, of_kind
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

_BLOCKS = 8  # of 16 rows of the matrix, for a program: one a warp
_HEIGHTS = (64, 128, 256)  # rows of x
_LEAST = 4  # tiles for a program
_MOST_SPLITS = 8
_WIDTH = 1024  # numbers that a program adds


def many_rows(x: Tensor, matrix: GGUFTiles, bias: Tensor | None, out: Tensor, fast: bool) -> None:
    rows, columns = x.shape
    height = next((height for height in _HEIGHTS if rows <= height), _HEIGHTS[-1])
    across, down = cdiv(rows, height), cdiv(matrix.rows, 16 * _BLOCKS)
    splits = _splits(down, matrix.tiles, x.device)
    found, is_last = out, splits == 1
    if not is_last:
        shape = (splits * rows, matrix.rows)
        found = torch.empty(shape, dtype=torch.float32, device=x.device)
    _many_rows[(across, down, splits)](
        x,
        matrix.codes,
        matrix.upper,
        matrix.scale,
        matrix.wide,
        bias if is_last and bias is not None else out,
        found,
        x.stride(0),
        found.stride(0),
        rows,
        matrix.rows,
        columns,
        matrix.tiles,
        cdiv(matrix.tiles, splits),
        BLOCKS=_BLOCKS,
        HEIGHT=height,
        RAGGED=columns % 128 != 0,
        BIASED=is_last and bias is not None,
        **of_kind(matrix.kind, x.dtype, fast),
        num_warps=_BLOCKS,
        num_stages=2,
        maxnreg=128 if height < _HEIGHTS[-1] else None,  # so that two run at once
    )
    if not is_last:
        _add[(rows, cdiv(matrix.rows, _WIDTH))](
            found,
            out if bias is None else bias,
            out,
            rows,
            matrix.rows,
            out.stride(0),
            splits,
            WIDTH=_WIDTH,
            BIASED=bias is not None,
        )


@memoise
def _splits(down: int, tiles: int, device: torch.device) -> int:
    """Programs that share columns: as many as there is room for, each with some tiles. The rows of
    x do not count, so that a matrix has the same kernels for all of them."""
    room = processors(device, interpreted=3)
    return max(1, min(room // down, tiles // _LEAST, _MOST_SPLITS))


@triton.jit(do_not_specialize=["rows"])
def _many_rows(
    x,
    codes,
    upper,
    scale,
    wide,
    bias,
    out,
    x_stride,
    out_stride,
    rows,
    features,
    columns,
    tiles,
    own_tiles,
    BLOCKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    RAGGED: tl.constexpr,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
    FAST: tl.constexpr,
    EXCESS: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block * 16 < features
    is_row = (row < rows)[:, None]
    column = _order(GROUP)
    inputs = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    sums = tl.zeros((BLOCKS * 16, HEIGHT), tl.float32)
    first = tl.program_id(2) * own_tiles
    for tile in range(first, tl.minimum(first + own_tiles, tiles)):
        number = block.to(tl.int64) * tiles + tile
        found = load_codes(codes, upper, number, live, BITS, UPPER)
        of_groups = load_groups(scale, number, live, GROUP, SCALES, LOWS)
        factors = load_wide(wide, number // 2, live, WIDE, LOWS)
        chunks = chunks_of(found, BITS, UPPER, ZERO, TABLE, FAST, ASM, CONSTRAINTS, dtype)
        numbers = by_group(chunks, GROUP)
        for i in tl.static_range(4):
            if GROUP == 32:
                weights = _scaled(
                    numbers[i], of_groups[i], factors, SCALES, SCALE_ZERO, LOWS, WIDE, FAST
                )
            else:
                early = _scaled(
                    numbers[2 * i], of_groups[2 * i], factors, SCALES, SCALE_ZERO, LOWS, WIDE, FAST
                )
                late = _scaled(
                    numbers[2 * i + 1], of_groups[2 * i + 1], factors,
                    SCALES, SCALE_ZERO, LOWS, WIDE, FAST,
                )  # fmt: skip
                weights = tl.permute(tl.join(early, late), (0, 1, 3, 2))
            weights = tl.reshape(weights, (BLOCKS * 16, 32))
            start = tile * 128 + i * 32
            is_number = is_row
            if RAGGED:
                is_number = is_row & (start + column < columns)[None, :]
            values = tl.load(inputs + start, mask=is_number, other=0.0)
            sums = tl.dot(weights, tl.trans(values), sums)
    feature = tl.program_id(1) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    is_feature = feature < features
    if BIASED:
        sums += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    target = (tl.program_id(2) * rows + row).to(tl.int64)[None, :] * out_stride + feature[:, None]
    result = sums.to(out.dtype.element_ty)
    tl.store(out + target, result, mask=(row < rows)[None, :] & is_feature[:, None])


@triton.jit
def _order(GROUP: tl.constexpr):
    """The columns of a chunk in the order of fragments (`kernels/gguf_tiles.py`)."""
    place = tl.arange(0, 32)
    fragment, k8, t, pair = place // 16, place // 8 % 2, place // 2 % 4, place % 2
    if GROUP == 32:
        column = t * 8 + fragment * 4 + k8 * 2 + pair
    else:
        column = fragment * 16 + t * 4 + k8 * 2 + pair
    return column


@triton.jit
def _scaled(
    numbers,
    words,
    wide,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Weights `[blocks, 16, GROUP]`, rounded once."""
    scales, lows = group_scales(words, SCALES, SCALE_ZERO, LOWS, FAST)
    if WIDE:
        factors, of_lows = wide_factors(wide, LOWS)
        scales *= factors
        lows *= of_lows
    weights = numbers.to(tl.float32) * scales[:, :, None]
    if LOWS:
        weights += lows[:, :, None]
    return weights.to(numbers.dtype)


@triton.jit(do_not_specialize=["rows", "splits"])
def _add(
    found,
    bias,
    out,
    rows,
    features,
    out_stride,
    splits,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = feature < features
    total = tl.zeros((WIDTH,), tl.float32)
    for split in range(splits):
        source = found + (split * rows + row) * features + feature
        total += tl.load(source, mask=live, other=0.0)
    if BIASED:
        total += tl.load(bias + feature, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + feature, total.to(out.dtype.element_ty), mask=live)
