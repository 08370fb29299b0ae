"""Codes by codes for few rows: as fast as weights are read, with every processor at work.

A program multiplies a few rows of the matrix, all columns of them, so that no partial sums have to
meet in a second kernel; its warps share the columns. What tensor cores add up is float32, and codes
in fp8 become float16 on their way, which loses nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.codes import BlockScales, Codes
from quire.kernels.triton.attention.tiles import fetch
from quire.kernels.triton.codes.scaled_sums import store_scaled
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

_ROWS = 16  # of x for a program: what tensor cores take
_FEATURES = 16
_WARPS = 4
_COLUMNS = 128  # that a warp takes at once: one group
_STAGES = 4


def multiply_few(x: Codes, weight: Tensor, scales: BlockScales, bias: Tensor | None) -> Tensor:
    """`[tokens, columns]` by `[features, columns]`; both scaled by rows, or in groups of 128."""
    (rows, columns), features = x.values.shape, len(weight)
    out = torch.empty((rows, features), dtype=x.dtype, device=weight.device)
    grid = (cdiv(features, _FEATURES), cdiv(rows, _ROWS))
    _multiply_few[grid](
        x.values,
        weight,
        x.scales,
        scales.values,
        out if bias is None else bias,
        out,
        rows,
        features,
        columns,
        scales.values.stride(0),
        x.scales.stride(1),
        ROWS=_ROWS,
        FEATURES=_FEATURES,
        PARTS=_WARPS,
        COLUMNS=_COLUMNS,
        SCALE_ROWS=scales.rows,
        GROUPED=not scales.is_by_rows,
        BIASED=bias is not None,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **pdl_launch(weight.device),
    )
    return out


@triton.jit(do_not_specialize=["rows", "x_scale_stride"])
def _multiply_few(
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
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    TILE: tl.constexpr = PARTS * COLUMNS
    first = tl.program_id(0) * FEATURES
    feature = first + tl.arange(0, FEATURES)
    feature_live = feature < features
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_live = row < rows
    part = tl.arange(0, PARTS)
    if PDL:
        line = tl.arange(0, 2 * TILE // 128) * 128
        wanted = feature_live[:, None] & (line < columns)[None, :]
        begin = weight + feature.to(tl.int64)[:, None] * columns
        fetch(begin + line[None, :], wanted.to(tl.int32))
    trigger_then_wait(PDL)

    # Three dimensions: warps, whose products are of different columns, by two of a product.
    w_column = part[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    x_column = part[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :, None]
    w_source = weight + feature.to(tl.int64)[None, :, None] * columns + w_column
    x_source = x + row[None, None, :] * columns + x_column
    kind: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros((PARTS, FEATURES, ROWS), kind)
    for start in range(0, columns, TILE):
        w_live = feature_live[None, :, None] & (start + w_column < columns)
        x_live = row_live[None, None, :] & (start + x_column < columns)
        w_tile = tl.load(w_source + start, mask=w_live, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x_source + start, mask=x_live, other=0.0)
        if GROUPED:
            group = start // COLUMNS + part
            live = group * COLUMNS < columns
            scale = tl.load(
                scales + first // SCALE_ROWS * scale_stride + group, mask=live, other=0.0
            )
            x_scale = tl.load(
                x_scales + group[:, None] * x_scale_stride + row[None, :],
                mask=live[:, None] & row_live[None, :],
                other=0.0,
            )
            sums += tl.dot(w_tile, x_tile) * (scale[:, None] * x_scale)[:, None, :]
        else:
            sums = tl.dot(w_tile, x_tile, sums, out_dtype=kind)
    down, across = feature[:, None], row[None, :]
    store_scaled(
        tl.sum(sums, 0),
        x_scales,
        scales,
        bias,
        out,
        across,
        down,
        rows,
        features,
        GROUPED,
        BIASED,
    )
