"""Many rows times a four-bit matrix, at the rate of tensor cores.

The weights are the left factor: on Hopper GPUs a warpgroup takes it from registers, where the codes
are unpacked. Each is unpacked once for a block of x's rows, which are the columns of the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.int4.unpack import (
    load_by_chunk,
    load_words,
    load_zeros,
    numbers_of,
)


def many_rows(
    x: Tensor,
    matrix: Int4Tiles,
    bias: Tensor | None,
    fast: bool,
    blocks: int = 8,
    height: int = 128,
    warps: int = 8,
    stages: int = 3,
    splits: int = 1,
) -> Tensor:
    words, scale, zero, group = matrix
    rows, columns = x.shape
    features = words.shape[0]
    kind = x.dtype if splits == 1 else torch.float32
    out = torch.empty((splits, rows, features), dtype=kind, device=x.device)
    grid = (triton.cdiv(rows, height), triton.cdiv(features, 16 * blocks), splits)
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
        BLOCKS=blocks,
        HEIGHT=height,
        SPLITS=splits,
        ZEROS=zero is not None,
        BIASED=bias is not None,
        FAST=fast,
        num_warps=warps,
        num_stages=stages,
    )
    return out[0] if splits == 1 else out.sum(0).to(x.dtype)


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
    SPLITS: tl.constexpr,
    ZEROS: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    row = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block * 16 < features
    tiles = columns // 128
    first = tl.program_id(2) * tiles // SPLITS
    last = (tl.program_id(2) + 1) * tiles // SPLITS
    inputs = x + row[:, None] * x_stride + (first * 128 + tl.arange(0, 32))[None, :]
    is_row = (row < rows)[:, None]
    codes = words + (block.to(tl.int64) * tiles) * 512
    of_block = block * (columns // GROUP) * 16
    sums = tl.zeros((BLOCKS * 16, HEIGHT), tl.float32)
    for tile in range(first, last):
        found = load_words(codes + tile * 512, live)
        first_group = of_block + tile * 128 // GROUP * 16
        scales = load_by_chunk(scale + first_group, live, GROUP)
        zeros = scales
        if ZEROS:
            zeros = load_zeros(zero, first_group, live, GROUP)
        numbers = numbers_of(found, scales, zeros, ZEROS, FAST, dtype)
        for chunk in tl.static_range(4):
            values = tl.load(inputs + chunk * 32, mask=is_row, other=0.0)
            sums = tl.dot(tl.reshape(numbers[chunk], (BLOCKS * 16, 32)), tl.trans(values), sums)
        inputs += 128
    feature = tl.program_id(1) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    if BIASED:
        sums += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[:, None]
    target = out + (tl.program_id(2) * rows + row)[None, :] * features + feature[:, None]
    mask = (row < rows)[None, :] & (feature < features)[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=mask)
