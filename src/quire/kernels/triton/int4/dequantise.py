"""A four-bit matrix as numbers, for products of so many rows that the writing is little beside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.int4.unpack import load_numbers
from quire.kernels.triton.sizes import cdiv

_TILES = 4  # of a program: one a warp


def dequantise(matrix: Int4Tiles, dtype: torch.dtype, fast: bool) -> Tensor:
    """`[rows, columns]`, which are forgotten after the product: one matrix at a time takes room."""
    words, scale, zero, group = matrix
    rows, columns = len(words), 4 * words.shape[1]
    out = torch.empty((rows, columns), dtype=dtype, device=words.device)
    _dequantise[(rows // 16, cdiv(columns // 128, _TILES))](
        words,
        scale,
        words if zero is None else zero.view(-1).view(torch.int16),
        out,
        columns,
        GROUP=group,
        TILES=_TILES,
        ZEROS=zero is not None,
        FAST=fast,
        num_warps=_TILES,
    )
    return out


@triton.jit
def _dequantise(
    words,
    scale,
    zero,
    out,
    columns,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    ZEROS: tl.constexpr,
    FAST: tl.constexpr,
):
    block = tl.program_id(0)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    dtype: tl.constexpr = out.dtype.element_ty
    live = tile < columns // 128
    numbers = load_numbers(
        words, scale, zero, block, tile, columns, live, GROUP, ZEROS, FAST, dtype
    )
    row = block.to(tl.int64) * 16 + tl.arange(0, 16)
    for chunk in tl.static_range(4):
        column = (tile * 128 + chunk * 32)[:, None, None] + tl.arange(0, 32)[None, None, :]
        target = out + row[None, :, None] * columns + column
        tl.store(target, numbers[chunk], mask=column < columns)
