"""Few rows times a matrix of one of GGUF's types: as fast as the codes are read.

A program has 16 rows of the matrix and all columns, which its warps share; the sums meet at the
end. The weights are the left factor, so that eight rows of x cost tensor cores what one does. What
they multiply is exact: the codes less zeros. Each group's sums are scaled, not the weights; and its
low is added times the group's sum of x, which tensor cores find, too, where it is needed.

The codes of the first steps are asked for before the kernel ahead is done (`pdl.py`), and others as
registers get free.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gguf_tiles import GGUFTiles
from quire.kernels.triton.gguf.unpack import (
    chunks_of,
    load_codes,
    load_scales,
    load_wide,
    of_kind,
)
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

MOST_ROWS = 16  # of x
_WARPS = 4
_TOGETHER = 4  # tiles of a step


def few_rows(x: Tensor, matrix: GGUFTiles, bias: Tensor | None, out: Tensor, fast: bool) -> None:
    rows, columns = x.shape
    _few_rows[(cdiv(matrix.rows, 16),)](
        x,
        matrix.codes,
        matrix.upper,
        matrix.scale,
        matrix.low,
        matrix.wide_scale,
        matrix.wide_low,
        out if bias is None else bias,
        out,
        x.stride(0),
        out.stride(0),
        rows,
        matrix.rows,
        columns,
        matrix.tiles,
        HEIGHT=8 if rows <= 8 else 16,
        TOGETHER=_TOGETHER,
        BIASED=bias is not None,
        **of_kind(matrix.kind, x.dtype, fast),
        num_warps=_WARPS,
        num_stages=1,
        **pdl_launch(x.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x,
    codes,
    upper,
    scale,
    low,
    wide_scale,
    wide_low,
    bias,
    out,
    x_stride,
    out_stride,
    rows,
    features,
    columns,
    tiles,
    HEIGHT: tl.constexpr,
    TOGETHER: tl.constexpr,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    TABLE: tl.constexpr,
    FAST: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    runs: tl.constexpr = TOGETHER * 32 // GROUP  # of a chunk's columns that share a scale
    block = tl.program_id(0)
    first = block.to(tl.int64) * tiles
    tile = tl.arange(0, TOGETHER)
    coming = load_codes(codes, upper, first + tile, tile < tiles, BITS, UPPER)
    trigger_then_wait(PDL)

    # Of each run its tile, its place in the chunk, and where its row's scales lie.
    run_tile = tl.arange(0, runs) // (32 // GROUP)
    run = tl.arange(0, runs) % (32 // GROUP)
    lies = (tl.arange(0, 16) % 8 * 2 + tl.arange(0, 16) // 8)[None, :]
    ones = tl.full((runs, 16, GROUP), 1.0, dtype)
    sums = tl.zeros((runs, 16, HEIGHT), tl.float32)
    for start in range(0, tiles, TOGETHER):
        numbers = chunks_of(coming, BITS, UPPER, ZERO, TABLE, FAST, ASM, CONSTRAINTS, dtype)
        following = start + TOGETHER + tile
        coming = load_codes(codes, upper, first + following, following < tiles, BITS, UPPER)
        live = (start + run_tile < tiles)[:, None]
        group = ((first + start + run_tile) * 4 * (32 // GROUP) + run)[:, None] * 16 + lies
        wide = (block * (tiles // 2) + (start + run_tile) // 2)[:, None] * 16 + lies
        factor, low_factor = load_wide(wide_scale, wide_low, wide, live, SCALES, LOWS)
        scaled = tl.zeros((runs, 16, HEIGHT), tl.float32)
        lowered = scaled
        for chunk in tl.static_range(4):
            at = group + chunk * (32 // GROUP) * 16
            scales, lows = load_scales(scale, low, at, live, SCALES, SCALE_ZERO, LOWS)
            column = start * 128 + chunk * 32
            inputs = _load_inputs(x, x_stride, rows, column, columns, TOGETHER, HEIGHT)
            inputs = tl.reshape(inputs, (runs, GROUP, HEIGHT))
            weights = _by_run(numbers[chunk], GROUP)
            scaled += tl.dot(weights, inputs) * scales[:, :, None]
            if LOWS:
                lowered += tl.dot(ones, inputs) * lows[:, :, None]
        sums += scaled * factor[:, :, None]
        if LOWS:
            sums += lowered * low_factor[:, :, None]

    result = tl.sum(sums, 0)
    feature = block * 16 + tl.arange(0, 16)
    is_feature = feature < features
    if BIASED:
        result += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    row = tl.arange(0, HEIGHT)
    target = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
    tl.store(target, result.to(dtype), mask=(row < rows)[None, :] & is_feature[:, None])


@triton.jit
def _by_run(numbers, GROUP: tl.constexpr):
    """Fragments `[tiles, 2, 16, 16]`, each of them a run, or both of a tile one."""
    tiles: tl.constexpr = numbers.shape[0]
    if GROUP == 16:
        result = tl.reshape(numbers, (tiles * 2, 16, 16))
    else:
        result = tl.reshape(tl.permute(numbers, (0, 2, 1, 3)), (tiles, 16, 32))
    return result


@triton.jit
def _load_inputs(x, x_stride, rows, column, columns, TOGETHER: tl.constexpr, HEIGHT: tl.constexpr):
    """A chunk of x of each tile, `[tiles, 4, 4, 2, HEIGHT]`, by threads as fragments have it.

    Of rows that there are not, others take the places: what becomes of them is not stored.
    """
    thread = tl.arange(0, 4 * HEIGHT)[:, None, None, None]
    row = tl.minimum(thread // 4, rows - 1)
    within = tl.arange(0, 4)[None, None, :, None] * 8 + thread % 4 * 2
    within += tl.arange(0, 2)[None, None, None, :]
    place = column + tl.arange(0, TOGETHER)[None, :, None, None] * 128 + within
    values = tl.load(x + (row * x_stride + place), mask=place < columns, other=0.0)
    values = tl.reshape(values, (HEIGHT, 4, TOGETHER, 4, 2))
    return tl.permute(values, (2, 3, 1, 4, 0))
