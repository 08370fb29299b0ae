"""Codes by codes for some rows: dozens, or hundreds by few features.

A program computes a tile of tokens by features, small enough that there are enough of them for all
processors. Where there are not, two programs share the columns of each, and a second kernel adds
what they found.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.codes import BlockScales, Codes
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait

_TILE = 64  # tokens, and features
_COLUMNS = 128
_WARPS, _STAGES = 4, 6
_WIDTH = 1024  # sums added at once


@memoise
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: some products in two parts, some not
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_tiled(rows: int, features: int, is_by_rows: bool, device: torch.device) -> bool:
    """Whether this is faster than torch's product; measured on an H200, and so for Hopper alone."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    waves = 2 if is_by_rows else 1
    return _tiles(rows, features) <= waves * _processors(device)


def _tiles(rows: int, features: int) -> int:
    return -(-rows // _TILE) * -(-features // _TILE)


def multiply_tiles(x: Codes, weight: Tensor, scales: BlockScales, bias: Tensor | None) -> Tensor:
    """`[tokens, columns]` by `[features, columns]`; both scaled by rows, or in groups of 128."""
    (rows, columns), features = x.values.shape, len(weight)
    parts = 2 if _tiles(rows, features) <= _processors(weight.device) else 1
    out = torch.empty((rows, features), dtype=x.dtype, device=weight.device)
    sums = out
    if parts > 1:
        sums = torch.empty((parts, rows, features), dtype=torch.float32, device=weight.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(features, _TILE), parts)
    pdl = pdl_launch(weight.device)
    grouped = not scales.is_by_rows
    _multiply_tiles[grid](
        TensorDescriptor.from_tensor(x.values, [_TILE, _COLUMNS]),
        TensorDescriptor.from_tensor(weight, [_TILE, _COLUMNS]),
        x.scales,
        scales.values,
        out if bias is None else bias,
        sums,
        rows,
        features,
        columns,
        scales.values.stride(0),
        x.scales.stride(1),
        TILE=_TILE,
        COLUMNS=_COLUMNS,
        PARTS=parts,
        SCALE_ROWS=scales.rows,
        GROUPED=grouped,
        BIASED=bias is not None,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **pdl,
    )
    if parts > 1:
        _add_parts[(rows, triton.cdiv(features, _WIDTH))](
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
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums that are whole are scaled and rounded; of parts, those in groups are scaled."""
    first_row, first = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    row, feature = first_row + tl.arange(0, TILE), first + tl.arange(0, TILE)
    row_live, feature_live = row < rows, feature < features
    groups = tl.cdiv(columns, COLUMNS)
    begin = tl.program_id(2) * groups // PARTS
    end = (tl.program_id(2) + 1) * groups // PARTS
    trigger_then_wait(PDL)
    sums = tl.zeros((TILE, TILE), tl.float32)
    for group in range(begin, end):
        x_tile = x.load([first_row, group * COLUMNS])
        tile = weight.load([first, group * COLUMNS])
        if GROUPED:
            scale = tl.load(scales + first // SCALE_ROWS * scale_stride + group)
            x_scale = tl.load(x_scales + group * x_scale_stride + row, mask=row_live, other=0.0)
            sums += tl.dot(x_tile, tile.T) * (x_scale * scale)[:, None]
        else:
            sums = tl.dot(x_tile, tile.T, sums)
    place = row.to(tl.int64)[:, None] * features + feature[None, :]
    live = row_live[:, None] & feature_live[None, :]
    if PARTS > 1:
        tl.store(out + tl.program_id(2) * rows * features + place, sums, mask=live)
    else:
        if not GROUPED:
            x_scale = tl.load(x_scales + row, mask=row_live, other=0.0)
            scale = tl.load(scales + feature, mask=feature_live, other=0.0)
            sums *= x_scale[:, None] * scale[None, :]
        if BIASED:
            sums += tl.load(bias + feature, mask=feature_live, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=live)


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
    row = tl.program_id(0)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = feature < features
    trigger_then_wait(PDL)
    total = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (part * rows + row) * features + feature, mask=live, other=0.0)
    if not GROUPED:
        total *= tl.load(x_scales + row) * tl.load(scales + feature, mask=live, other=0.0)
    if BIASED:
        total += tl.load(bias + feature, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * features + feature, total.to(out.dtype.element_ty), mask=live)
