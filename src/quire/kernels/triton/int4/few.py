"""Few rows times a four-bit matrix: as fast as the codes are read.

A program has 16 rows of the matrix (for a gate, 16 of either half) and all columns, which its warps
share: each multiplies every so many tiles, and the sums meet at the end. The weights are the left
factor, so that eight rows of x cost tensor cores what one does. The loop over tiles is unrolled:
each instruction counts here. The first tiles are asked for before the kernel ahead is done
(`pdl.py`), and others as registers get free.

Where a tile has one scale for a row, sums are scaled instead of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.int4.unpack import (
    by_chunk,
    less_zeros,
    load_by_chunk,
    load_words,
    load_zeros,
    unpack,
    zeros_by_chunk,
)
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

_WARPS = 4  # with more, they wait longer for each other than they save
_AHEAD = 4  # steps


def few_rows(
    x: Tensor,
    matrix: Int4Tiles,
    bias: Tensor | None,
    activation: Activation | None,
    fast: bool,
) -> Tensor:
    words, scale, zero, group = matrix
    rows, columns = x.shape
    gated = activation is not None
    features = words.shape[0] // 2 if gated else words.shape[0]
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    # Tiles of a step: as many as there are registers for.
    together = 4 if gated or group % 128 else 8
    _few_rows[(features // 16,)](
        x,
        words,
        scale,
        words if zero is None else zero.view(-1).view(torch.int16),
        scale if bias is None else bias,
        out,
        x.stride(0),
        rows,
        features,
        COLUMNS=columns,
        GROUP=group,
        TOGETHER=together,
        AHEAD=min(_AHEAD, cdiv(columns // 128, together)),
        ZEROS=zero is not None,
        GATED=gated,
        GELU=activation is Activation.GELU_TANH,
        BIASED=bias is not None,
        FAST=fast,
        num_warps=_WARPS,
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
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr,
    ZEROS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    steps: tl.constexpr = (COLUMNS // 128 + TOGETHER - 1) // TOGETHER
    block = tl.program_id(0)
    up_block = block + features // 16
    ring = ()  # of what was asked for, step by step
    up_ring = ()
    for step in tl.static_range(AHEAD):
        tiles = _load(words, scale, zero, block, step, TOGETHER, COLUMNS, GROUP, ZEROS)
        ring = _appended(ring, tiles)
        if GATED:
            up = _load(words, scale, zero, up_block, step, TOGETHER, COLUMNS, GROUP, ZEROS)
            up_ring = _appended(up_ring, up)
    trigger_then_wait(PDL)

    sums = tl.zeros((TOGETHER, 16, 8), tl.float32)
    up_sums = sums
    for step in tl.static_range(steps):
        inputs = _load_rows(x, x_stride, rows, step, TOGETHER, COLUMNS)
        sums += _multiply(ring[step], inputs, GROUP, ZEROS, FAST, dtype)
        if GATED:
            up_sums += _multiply(up_ring[step], inputs, GROUP, ZEROS, FAST, dtype)
        if step + AHEAD < steps:
            coming = _load(words, scale, zero, block, step + AHEAD, TOGETHER, COLUMNS, GROUP, ZEROS)
            ring = _appended(ring, coming)
            if GATED:
                up = _load(
                    words, scale, zero, up_block, step + AHEAD, TOGETHER, COLUMNS, GROUP, ZEROS
                )
                up_ring = _appended(up_ring, up)

    feature = block * 16 + tl.arange(0, 16)
    row = tl.arange(0, 8)
    result = _finish(sums, bias, feature, BIASED, dtype)
    if GATED:
        up = _finish(up_sums, bias, features + feature, BIASED, dtype)
        # Rounded before it is multiplied, as models were trained.
        result = activate(result, GELU).to(dtype).to(tl.float32) * up
    target = out + row[None, :] * features + feature[:, None]
    tl.store(target, result.to(dtype), mask=(row < rows)[None, :] & (feature < features)[:, None])


@triton.jit
def _appended(ring, tiles):
    return ring + (tiles,)  # noqa: RUF005 (Triton has no other way)


@triton.jit
def _load(
    words,
    scale,
    zero,
    block,
    STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """A step's tiles of a block of 16 rows: codes, scales and zeros."""
    tiles: tl.constexpr = COLUMNS // 128
    tile = STEP * TOGETHER + tl.arange(0, TOGETHER)
    live = tile < tiles
    codes = load_words(words + (block.to(tl.int64) * tiles * 512 + tile * 512), live)
    first = block * (COLUMNS // GROUP * 16) + tile * 128 // GROUP * 16
    if GROUP % 128 == 0:
        row = tl.arange(0, 16)
        lies = row % 8 * 2 + row // 8
        source = scale + (first[:, None] + lies[None, :])
        scales = tl.load(source, mask=live[:, None], other=0.0)
    else:
        scales = load_by_chunk(scale + first, live, GROUP)
    zeros = scales
    if ZEROS:
        zeros = load_zeros(zero, first, live, GROUP)
    return codes, scales, zeros


@triton.jit
def _multiply(
    tiles,
    inputs,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    FAST: tl.constexpr,
    dtype: tl.constexpr,
):
    codes, scales, zeros = tiles
    x0, x1, x2, x3 = inputs
    lows = zeros_by_chunk(zeros, ZEROS, dtype)
    if GROUP % 128 == 0:
        a, b, c, d = less_zeros(codes, lows, FAST, dtype)
    else:
        a, b, c, d = unpack(codes, by_chunk(scales), lows, FAST, dtype)
    # Two sums, so that tensor cores have one to go on with.
    even = tl.dot(c, x2, tl.dot(a, x0))
    odd = tl.dot(d, x3, tl.dot(b, x1))
    result = even + odd
    if GROUP % 128 == 0:
        result *= scales[:, :, None].to(tl.float32)
    return result


@triton.jit
def _load_rows(
    x, x_stride, rows, STEP: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr
):
    """Of a step's tiles the four chunks of x, `[tiles, 32, 8]`, in the order of fragments.

    Of rows that there are not, others take the places: what becomes of them is not stored.
    """
    thread = tl.arange(0, 32)[:, None, None, None]
    first = (STEP * TOGETHER + tl.arange(0, TOGETHER)) * 128
    row = tl.minimum(thread // 4, rows - 1)
    eight = tl.arange(0, 4)[None, None, :, None] * 8
    pair = tl.arange(0, 2)[None, None, None, :]
    source = x + row * x_stride + (first[None, :, None, None] + (eight + thread % 4 * 2 + pair))
    live = (first < COLUMNS)[None, :, None, None]
    return (
        _as_fragments(tl.load(source, mask=live, other=0.0)),
        _as_fragments(tl.load(source + 32, mask=live, other=0.0)),
        _as_fragments(tl.load(source + 64, mask=live, other=0.0)),
        _as_fragments(tl.load(source + 96, mask=live, other=0.0)),
    )


@triton.jit
def _as_fragments(values):
    tiles: tl.constexpr = values.shape[1]
    values = tl.reshape(values, (8, 4, tiles, 4, 2))
    return tl.reshape(tl.permute(values, (2, 3, 1, 4, 0)), (tiles, 32, 8))


@triton.jit
def _finish(sums, bias, feature, BIASED: tl.constexpr, dtype: tl.constexpr):
    """The sums of all warps, rounded."""
    result = tl.sum(sums, 0)
    if BIASED:
        result += tl.load(bias + feature).to(tl.float32)[:, None]
    return result.to(dtype).to(tl.float32)
