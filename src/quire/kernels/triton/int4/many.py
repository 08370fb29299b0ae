"""Many rows times a four-bit matrix, at the rate of tensor cores: on GPUs that are no Hopper.

The weights are the left factor: each is unpacked once, in registers, for a block of x's rows, which
are the columns of the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.int4.unpack import load_numbers
from quire.kernels.triton.sizes import cdiv

_BLOCKS = 8  # of 16 rows of the matrix, for a program
_HEIGHT = 128  # rows of x
_WARPS, _STAGES = 8, 3


def many_rows(x: Tensor, matrix: Int4Tiles, bias: Tensor | None, fast: bool) -> Tensor:
    words, scale, zero, group = matrix
    rows, columns = x.shape
    features = words.shape[0]
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    grid = (cdiv(rows, _HEIGHT), cdiv(features, 16 * _BLOCKS))
    _many_rows[grid](
        x,
        words,
        scale,
        words if zero is None else zero.view(-1).view(torch.int16),
        scale if bias is None else bias,
        out,
        x.stride(0),
        rows,
        features,
        columns,
        GROUP=group,
        BLOCKS=_BLOCKS,
        HEIGHT=_HEIGHT,
        ZEROS=zero is not None,
        BIASED=bias is not None,
        FAST=fast,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _many_rows(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    x_stride,
    rows,
    features,
    columns,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    ZEROS: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    row = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block * 16 < features
    inputs = x + row[:, None] * x_stride + tl.arange(0, 32)[None, :]
    is_row = (row < rows)[:, None]
    sums = tl.zeros((BLOCKS * 16, HEIGHT), tl.float32)
    for tile in range(columns // 128):
        numbers = load_numbers(
            words, scale, zero, block, tile, columns, live, GROUP, ZEROS, FAST, dtype
        )
        for chunk in tl.static_range(4):
            values = tl.load(inputs + chunk * 32, mask=is_row, other=0.0)
            sums = tl.dot(tl.reshape(numbers[chunk], (BLOCKS * 16, 32)), tl.trans(values), sums)
        inputs += 128
    feature = tl.program_id(1) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    is_feature = feature < features
    if BIASED:
        sums += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    target = out + row[None, :] * features + feature[:, None]
    tl.store(target, sums.to(dtype), mask=(row < rows)[None, :] & is_feature[:, None])
