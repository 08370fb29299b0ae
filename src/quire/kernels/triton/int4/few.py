"""Few rows times a four-bit matrix: as fast as the codes are read.

A program has 16 rows of the matrix (for a gate, 16 of either half) and all columns, which its warps
share: each multiplies every so many tiles, and the sums meet at the end. The weights are the left
factor, so that a row of x takes a sixteenth of what tensor cores can do. While one tile is
multiplied, the next is on its way; the first is asked for before the kernel ahead is done
(`pdl.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.int4.unpack import by_chunk, load_by_chunk, load_words, unpack
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait

MOST_ROWS = 64
_WARPS = 8


def few_rows(
    x: Tensor,
    matrix: Int4Tiles,
    bias: Tensor | None,
    activation: Activation | None,
    fast: bool,
    warps: int = _WARPS,
    together: int = 8,
) -> Tensor:
    words, scale, zero, group = matrix
    rows, columns = x.shape
    gated = activation is not None
    features = words.shape[0] // 2 if gated else words.shape[0]
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    _few_rows[(features // 16,)](
        x,
        words,
        scale,
        scale if zero is None else zero,
        scale if bias is None else bias,
        out,
        x.stride(0),
        rows,
        features,
        columns,
        GROUP=group,
        ROWS=max(8, triton.next_power_of_2(rows)),
        TOGETHER=together,
        ZEROS=zero is not None,
        GATED=gated,
        GELU=activation is Activation.GELU_TANH,
        BIASED=bias is not None,
        FAST=fast,
        num_warps=warps,
        num_stages=1,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
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
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    ZEROS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    tile = tl.arange(0, TOGETHER)
    dtype: tl.constexpr = out.dtype.element_ty
    tiles = columns // 128
    sums = tl.zeros((TOGETHER, 16, ROWS), tl.float32)
    more_sums = sums
    more_block = block + features // 16
    codes, scales, zeros = load_tiles(words, scale, zero, block, tile, columns, GROUP, ZEROS)
    if GATED:
        more_codes, more_scales, more_zeros = load_tiles(
            words, scale, zero, more_block, tile, columns, GROUP, ZEROS
        )
    trigger_then_wait(PDL)
    for first in range(0, tiles, TOGETHER):
        this, coming = first + tile, first + TOGETHER + tile
        numbers = numbers_of(codes, scales, zeros, ZEROS, FAST, dtype)
        codes, scales, zeros = load_tiles(words, scale, zero, block, coming, columns, GROUP, ZEROS)
        if GATED:
            more_numbers = numbers_of(more_codes, more_scales, more_zeros, ZEROS, FAST, dtype)
            more_codes, more_scales, more_zeros = load_tiles(
                words, scale, zero, more_block, coming, columns, GROUP, ZEROS
            )
        for chunk in tl.static_range(4):
            inputs = _load_rows(x, x_stride, rows, this * 128 + chunk * 32, columns, ROWS)
            sums = tl.dot(numbers[chunk], inputs, sums)
            if GATED:
                more_sums = tl.dot(more_numbers[chunk], inputs, more_sums)

    feature = block * 16 + tl.arange(0, 16)
    row = tl.arange(0, ROWS)
    result = _finish(sums, bias, feature, BIASED, dtype)
    if GATED:
        up = _finish(more_sums, bias, features + feature, BIASED, dtype)
        # Rounded before it is multiplied, as models were trained.
        result = activate(result, GELU).to(dtype).to(tl.float32) * up
    target = out + row[None, :] * features + feature[:, None]
    tl.store(target, result.to(dtype), mask=(row < rows)[None, :] & (feature < features)[:, None])


@triton.jit
def load_tiles(words, scale, zero, block, tile, columns, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """Of a block of 16 rows the tiles of these numbers; scales and zeros as they are stored."""
    live = tile < columns // 128
    codes = load_words(words + (block.to(tl.int64) * (columns // 128) + tile) * 512, live)
    first = (block * (columns // GROUP) + tile * 128 // GROUP) * 16
    scales = load_by_chunk(scale + first, live, GROUP)
    zeros = scales
    if ZEROS:
        zeros = load_by_chunk(zero + first, live, GROUP)
    return codes, scales, zeros


@triton.jit
def numbers_of(codes, scales, zeros, ZEROS: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    if ZEROS:
        lows = by_chunk(zeros.to(dtype))
    else:
        middle = tl.full((1, 1, 1, 1, 1), 8.0, dtype)
        lows = (middle, middle, middle, middle)
    return unpack(codes, by_chunk(scales), lows, FAST, dtype)


@triton.jit
def _load_rows(x, x_stride, rows, first, columns, ROWS: tl.constexpr):
    """`[warps, 32, ROWS]`: 32 columns of x from each `first`, in the order of fragments."""
    warps: tl.constexpr = first.shape[0]
    thread = tl.arange(0, 32)[:, None, None, None, None]
    row = tl.arange(0, ROWS // 8)[None, None, :, None, None] * 8 + thread // 4
    eight = tl.arange(0, 4)[None, None, None, :, None] * 8
    pair = tl.arange(0, 2)[None, None, None, None, :]
    column = first[None, :, None, None, None] + (eight + thread % 4 * 2 + pair)
    live = (row < rows) & (first < columns)[None, :, None, None, None]
    found = tl.load(x + row * x_stride + column, mask=live, other=0.0)
    found = tl.reshape(found, (8, 4, warps, ROWS // 8, 4, 2))
    return tl.reshape(tl.permute(found, (2, 4, 1, 5, 3, 0)), (warps, 32, ROWS))


@triton.jit
def _finish(sums, bias, feature, BIASED: tl.constexpr, dtype: tl.constexpr):
    """The sums of all warps, rounded."""
    result = tl.sum(sums, 0)
    if BIASED:
        result += tl.load(bias + feature).to(tl.float32)[:, None]
    return result.to(dtype).to(tl.float32)
