"""Codes by codes for more than a few rows, on Hopper GPUs.

A program computes a tile of tokens by features. For dozens of rows, or hundreds by few features,
tiles are small, so that there are enough of them for all processors; where there still are not, two
programs share the columns of each, and a second kernel adds what they found. For many rows they are
large, and programs of neighbouring tiles run at the same time: they read the same codes. Between
the two are medium tiles, for 129 to 256 rows of more than 4,096 columns.

The hardware that copies tiles is slow where one goes beyond a tensor's end: 160 rows by 4,096
features of 12,288 columns took 43 µs on an H200, and take 28 with rows to spare behind them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.codes import BlockScales, Codes
from quire.kernels.triton.codes.scaled_sums import store_scaled
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

_COLUMNS = 128
_BAND = 8  # tiles of tokens that run together, for all features
_WIDTH = 1024  # sums added at once
_INTERPRETED = 4  # multiprocessors: so some products are in two parts, and some are not
_MANY_COLUMNS = 4096  # to go through more takes longer than a launch that adds two halves


class _Shape(NamedTuple):
    """Of a program: tokens and features of its tile, warps, stages of its loop."""

    rows: int
    features: int
    warps: int
    stages: int


# With three stages, or 256 tokens by 128 features, large tiles were 4 % slower on an H200 (int8).
_SMALL, _LARGE = _Shape(64, 64, 4, 6), _Shape(128, 256, 8, 4)
# Of many columns half as many codes are copied as for small tiles.
_MEDIUM = _Shape(128, 128, 4, 5)


def is_tiled(rows: int, features: int, is_by_rows: bool, device: torch.device) -> bool:
    """Whether tiles that are not large are faster than torch's product; measured on an H200."""
    waves = 1
    if is_by_rows:
        waves = 3 if rows <= _SMALL.rows else 2
    return _tiles(rows, features, _SMALL) <= waves * processors(device, _INTERPRETED)


def _tiles(rows: int, features: int, shape: _Shape) -> int:
    return -(-rows // shape.rows) * -(-features // shape.features)


def _shape_of(
    rows: int, features: int, columns: int, is_by_rows: bool, device: torch.device
) -> tuple[_Shape, int]:
    """That of a product's tiles, and how many programs share the columns of each: two, where one
    would leave half of the processors idle, or goes through many columns; measured on an H200."""
    # Not of codes in blocks: a large tile would have the features of two.
    if is_by_rows and not is_tiled(rows, features, True, device):
        return _LARGE, 1
    there_are = processors(device, _INTERPRETED)
    is_long = columns > _MANY_COLUMNS
    programs = 2 * _tiles(rows, features, _MEDIUM)
    is_filled = 7 * there_are // 8 <= programs <= there_are
    if is_by_rows and is_long and is_filled and _MEDIUM.rows < rows <= 2 * _MEDIUM.rows:
        return _MEDIUM, 2
    most = there_are if is_long else there_are // 2
    return _SMALL, 2 if _tiles(rows, features, _SMALL) <= most else 1


def multiply_tiles(x: Codes, weight: Tensor, scales: BlockScales, bias: Tensor | None) -> Tensor:
    """`[tokens, columns]` by `[features, columns]`; both scaled by rows, or in groups of 128."""
    (rows, columns), features = x.values.shape, len(weight)
    shape, parts = _shape_of(rows, features, columns, scales.is_by_rows, weight.device)
    out = torch.empty((rows, features), dtype=x.dtype, device=weight.device)
    sums = out
    if parts > 1:
        sums = torch.empty((parts, rows, features), dtype=torch.float32, device=weight.device)
    filled = x.filled_up(shape.rows).values
    pdl = pdl_launch(weight.device)
    grouped = not scales.is_by_rows
    _multiply_tiles[(_tiles(rows, features, shape), parts)](
        TensorDescriptor.from_tensor(filled, [shape.rows, _COLUMNS]),
        TensorDescriptor.from_tensor(weight, [shape.features, _COLUMNS]),
        x.scales,
        scales.values,
        out if bias is None else bias,
        sums,
        rows,
        features,
        columns,
        scales.values.stride(0),
        x.scales.stride(1),
        ROWS=shape.rows,
        FEATURES=shape.features,
        COLUMNS=_COLUMNS,
        BAND=_BAND,
        PARTS=parts,
        SCALE_ROWS=scales.rows,
        GROUPED=grouped,
        BIASED=bias is not None,
        IS_INT=weight.dtype == torch.int8,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **pdl,
    )
    if parts > 1:
        _add_parts[(rows, cdiv(features, _WIDTH))](
            sums,
            x.scales,
            scales.values,
            out if bias is None else bias,
            out,
            rows,
            features,
            PARTS=parts,
            WIDTH=_WIDTH,
            GROUPED=grouped,
            BIASED=bias is not None,
            **pdl,
        )
    return out


@triton.jit(do_not_specialize=["rows", "x_scale_stride"])
def _multiply_tiles(
    x,
    weight,
    x_scales,
    scales,
    bias,
    out,
    rows,
    features,
    columns,
    scale_stride,
    x_scale_stride,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BIASED: tl.constexpr,
    IS_INT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums that are whole are scaled and rounded; of parts, those in groups are scaled."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(features, FEATURES)
    band = tl.program_id(0) // (BAND * across) * BAND
    height = min(BAND, down - band)
    within = tl.program_id(0) % (BAND * across)
    first_row, first = (band + within % height) * ROWS, within // height * FEATURES
    row, feature = first_row + tl.arange(0, ROWS), first + tl.arange(0, FEATURES)
    groups = tl.cdiv(columns, COLUMNS)
    begin = tl.program_id(1) * groups // PARTS
    end = (tl.program_id(1) + 1) * groups // PARTS
    trigger_then_wait(PDL)
    kind: tl.constexpr = tl.int32 if IS_INT else tl.float32
    sums = tl.zeros((ROWS, FEATURES), kind)
    for group in range(begin, end):
        x_tile = x.load([first_row, group * COLUMNS])
        tile = weight.load([first, group * COLUMNS])
        if GROUPED:
            scale = tl.load(scales + first // SCALE_ROWS * scale_stride + group)
            x_scale = tl.load(x_scales + group * x_scale_stride + row, mask=row < rows, other=0.0)
            sums += tl.dot(x_tile, tile.T) * (x_scale * scale)[:, None]
        else:
            sums = tl.dot(x_tile, tile.T, sums, out_dtype=kind)
    down, across = row[:, None], feature[None, :]
    if PARTS > 1:
        place = (tl.program_id(1) * rows + down).to(tl.int64) * features + across
        tl.store(out + place, sums.to(tl.float32), mask=(down < rows) & (across < features))
    else:
        store_scaled(
            sums, x_scales, scales, bias, out, down, across, rows, features, GROUPED, BIASED
        )


@triton.jit(do_not_specialize=["rows"])
def _add_parts(
    sums,
    x_scales,
    scales,
    bias,
    out,
    rows,
    features,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    trigger_then_wait(PDL)
    total = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * rows + row) * features + feature
        total += tl.load(sums + place, mask=feature < features, other=0.0)
    store_scaled(total, x_scales, scales, bias, out, row, feature, rows, features, GROUPED, BIASED)
