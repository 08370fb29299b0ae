"""Few rows times a matrix of one of GGUF's types: as fast as the codes are read.

A program has 16 rows of the matrix and all columns, which its warps share; the sums meet at the
end. The weights are the left factor, so that eight rows of x cost tensor cores what one does. What
they multiply is exact: the codes, with a number in excess that they multiply, too, with the other
sign. Each group's sums are scaled, not the weights; and its low is added times the group's sum of
x, which tensor cores find as well.

The first two steps are asked for before the kernel ahead is done (`pdl.py`), and others as
registers get free. Two steps are one turn of the loop: nothing is moved between registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gguf_tiles import GGUFTiles
from quire.kernels.triton.gguf.scales import group_scales, load_groups, load_wide, wide_factors
from quire.kernels.triton.gguf.unpack import by_group, chunks_of, load_codes, of_kind
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

MOST_ROWS = 8  # of x
_WARPS = 8  # each has one tile of a step


def few_rows(x: Tensor, matrix: GGUFTiles, bias: Tensor | None, out: Tensor, fast: bool) -> None:
    rows, columns = x.shape
    _few_rows[(cdiv(matrix.rows, 16),)](
        x,
        matrix.codes,
        matrix.upper,
        matrix.scale,
        matrix.wide,
        out if bias is None else bias,
        out,
        x.stride(0),
        out.stride(0),
        rows,
        matrix.rows,
        columns,
        matrix.tiles,
        TOGETHER=_WARPS,
        RAGGED=columns % 128 != 0,
        WHOLE=columns % (128 * 2 * _WARPS) == 0,
        BIASED=bias is not None,
        **of_kind(matrix.kind, x.dtype, fast, is_exact=False),
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
    wide,
    bias,
    out,
    x_stride,
    out_stride,
    rows,
    features,
    columns,
    tiles,
    TOGETHER: tl.constexpr,
    RAGGED: tl.constexpr,
    WHOLE: tl.constexpr,
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
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    block = tl.program_id(0)
    even = _load_step(
        codes, upper, scale, wide, block, 0, tiles, TOGETHER, BITS, UPPER, GROUP, SCALES, LOWS, WIDE
    )
    odd = _load_step(
        codes, upper, scale, wide, block, TOGETHER, tiles, TOGETHER,
        BITS, UPPER, GROUP, SCALES, LOWS, WIDE,
    )  # fmt: skip
    trigger_then_wait(PDL)

    sums = tl.zeros((TOGETHER, 16, 8), tl.float32)
    for start in range(0, tiles, 2 * TOGETHER):
        chunks = chunks_of(even[0], BITS, UPPER, ZERO, TABLE, FAST, ASM, CONSTRAINTS, dtype)
        sums += _multiply(
            chunks, even[1], even[2], x, x_stride, rows, columns, start, tiles,
            RAGGED, WHOLE, GROUP, SCALES, SCALE_ZERO, LOWS, WIDE, EXCESS, FAST,
        )  # fmt: skip
        even = _load_step(
            codes, upper, scale, wide, block, start + 2 * TOGETHER, tiles, TOGETHER,
            BITS, UPPER, GROUP, SCALES, LOWS, WIDE,
        )  # fmt: skip
        chunks = chunks_of(odd[0], BITS, UPPER, ZERO, TABLE, FAST, ASM, CONSTRAINTS, dtype)
        sums += _multiply(
            chunks, odd[1], odd[2], x, x_stride, rows, columns, start + TOGETHER, tiles,
            RAGGED, WHOLE, GROUP, SCALES, SCALE_ZERO, LOWS, WIDE, EXCESS, FAST,
        )  # fmt: skip
        odd = _load_step(
            codes, upper, scale, wide, block, start + 3 * TOGETHER, tiles, TOGETHER,
            BITS, UPPER, GROUP, SCALES, LOWS, WIDE,
        )  # fmt: skip

    result = tl.sum(sums, 0)
    feature = block * 16 + tl.arange(0, 16)
    is_feature = feature < features
    if BIASED:
        result += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    row = tl.arange(0, 8)
    target = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
    tl.store(target, result.to(dtype), mask=(row < rows)[None, :] & is_feature[:, None])


@triton.jit
def _load_step(
    codes,
    upper,
    scale,
    wide,
    block,
    start,
    tiles,
    TOGETHER: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile for each warp, from this one of a row of them on: codes, scales, and what they share
    with the next or the last tile. Of tiles that there are not, all are zeros."""
    tile = start + tl.arange(0, TOGETHER)
    live = tile < tiles
    number = block.to(tl.int64) * tiles + tile
    return (
        load_codes(codes, upper, number, live, BITS, UPPER),
        load_groups(scale, number, live, GROUP, SCALES, LOWS),
        load_wide(wide, number // 2, live, WIDE, LOWS),
    )


@triton.jit
def _multiply(
    chunks,
    of_groups,
    of_wide,
    x,
    x_stride,
    rows,
    columns,
    start,
    tiles,
    RAGGED: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    EXCESS: tl.constexpr,
    FAST: tl.constexpr,
):
    """The products of a step, `[tiles, 16, 8]`."""
    together: tl.constexpr = chunks[0].shape[0]
    dtype: tl.constexpr = x.dtype.element_ty
    numbers = by_group(chunks, GROUP)
    inputs = _inputs_at(x, x_stride, rows, start, tiles, together, WHOLE, GROUP)
    ones = tl.full((together, 16, GROUP), 1.0, dtype)
    less = tl.full((together, 16, GROUP), -EXCESS, dtype)
    scaled = tl.zeros((together, 16, 8), tl.float32)
    lowered = scaled
    for i in tl.static_range(128 // GROUP):
        scales, lows = group_scales(of_groups[i], SCALES, SCALE_ZERO, LOWS, FAST)
        left = columns - start * 128 - i * GROUP
        values = _load_inputs(inputs + i * GROUP, left, GROUP, RAGGED)
        found = tl.dot(numbers[i], values)
        if EXCESS > 0:
            found = tl.dot(less, values, found)
        scaled += found * scales[:, :, None]
        if LOWS:
            lowered += tl.dot(ones, values) * lows[:, :, None]
    if WIDE:
        factors, of_lows = wide_factors(of_wide, LOWS)
        scaled *= factors[:, :, None]
        lowered *= of_lows[:, :, None]
    if LOWS:
        scaled += lowered
    return scaled


@triton.jit
def _inputs_at(
    x,
    x_stride,
    rows,
    start,
    tiles,
    TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Where the first numbers of a step's tiles are that each thread has, of its row of x.

    Of rows and tiles that there are not, others take the places: rows are not stored, and tiles
    are multiplied by zeros.
    """
    thread = tl.arange(0, 32)[:, None]
    row = tl.minimum(thread // 4, rows - 1).to(tl.int64)
    tile = tl.arange(0, TOGETHER)[None, :]
    if WHOLE:
        inputs = (x + row * x_stride + thread % 4 * (GROUP // 4) + tile * 128) + start * 128
    else:
        inputs = (x + row * x_stride + thread % 4 * (GROUP // 4)) + tl.minimum(
            start + tile, tiles - 1
        ) * 128
    return inputs


@triton.jit
def _load_inputs(inputs, left, GROUP: tl.constexpr, RAGGED: tl.constexpr):
    """The columns of a group, `[tiles, GROUP, 8]`, by threads as fragments have them."""
    tiles: tl.constexpr = inputs.shape[1]
    own: tl.constexpr = GROUP // 4
    place = tl.arange(0, own)[None, None, :]
    source = inputs[:, :, None] + place
    if RAGGED:
        first = (tl.arange(0, 32) % 4 * own)[:, None] + tl.arange(0, tiles)[None, :] * 128
        values = tl.load(source, mask=first[:, :, None] + place < left, other=0.0)
    else:
        values = tl.load(source)
    if GROUP == 32:
        values = tl.reshape(values, (8, 4, tiles, 2, 2, 2))
        values = tl.permute(values, (2, 3, 4, 1, 5, 0))
    else:
        values = tl.permute(tl.reshape(values, (8, 4, tiles, 2, 2)), (2, 3, 1, 4, 0))
    return tl.reshape(values, (tiles, GROUP, 8))
