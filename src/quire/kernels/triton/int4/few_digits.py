"""Few rows times a four-bit matrix, by integer tensor cores: as fast as the codes are read.

A program has 16 rows of the matrix (for a gate, 16 of either half) and all columns, which its warps
share. The weights are the left factor, as bytes; x's rows are the right one, as two digits each
(`digits.py`). A tile's sums, which are exact, are scaled at once. So groups are of whole tiles.

The codes of the first steps are asked for before the kernel ahead is done (`pdl.py`), and others as
registers get free.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.digit_steps import BASE
from quire.kernels.triton.int4.digits import MIDDLE, digits, signed_codes
from quire.kernels.triton.int4.unpack import load_words, load_zeros
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_MOST_ROWS = 2  # of x: each program makes digits of all of them


class Shape(NamedTuple):
    """How a program goes through its tiles."""

    warps: int
    together: int  # tiles of a step
    ahead: int  # steps


def fits(x: Tensor, matrix: Int4Tiles) -> bool:
    """Whether there are few enough rows, and each tile has one scale for a row."""
    return 0 < len(x) <= _MOST_ROWS and matrix.group % 128 == 0


def few_rows(
    x: Tensor,
    matrix: Int4Tiles,
    bias: Tensor | None,
    activation: Activation | None,
    fast: bool,
    shape: Shape | None = None,
) -> Tensor:
    words, scale, zero, group = matrix
    rows, columns = x.shape
    gated = activation is not None
    features = words.shape[0] // 2 if gated else words.shape[0]
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    shape = shape or shape_for(columns, gated)
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
        ROWS=next_power_of_2(rows),
        COLUMNS=columns,
        GROUP=group,
        TOGETHER=shape.together,
        AHEAD=shape.ahead,
        ZEROS=zero is not None,
        GATED=gated,
        GELU=activation is Activation.GELU_TANH,
        BIASED=bias is not None,
        FAST=fast,
        num_warps=shape.warps,
        num_stages=1,
        **pdl_launch(x.device),
    )
    return out


def shape_for(columns: int, gated: bool) -> Shape:
    """What was fastest on an H200 with Qwen3-8B's matrices: all of a row at once, where there are
    registers for it, by as few warps as can hold it."""
    tiles = columns // 128
    together = next_power_of_2(tiles)
    if gated:
        together = min(8, together)
        return Shape(4, together, min(2, cdiv(tiles, together)))
    return Shape(4 if together <= 32 else 8, min(32, together), 1)


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
    ROWS: tl.constexpr,
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

    sums = tl.zeros((TOGETHER, 2, 8, 4), tl.float32)
    up_sums = sums
    for step in tl.static_range(steps):
        inputs = digits(x, x_stride, rows, step * TOGETHER, ROWS, TOGETHER, COLUMNS, ZEROS, FAST)
        sums += _multiply(ring[step], inputs, ZEROS, FAST)
        if GATED:
            up_sums += _multiply(up_ring[step], inputs, ZEROS, FAST)
        if step + AHEAD < steps:
            coming = _load(words, scale, zero, block, step + AHEAD, TOGETHER, COLUMNS, GROUP, ZEROS)
            ring = _appended(ring, coming)
            if GATED:
                up = _load(
                    words, scale, zero, up_block, step + AHEAD, TOGETHER, COLUMNS, GROUP, ZEROS
                )
                up_ring = _appended(up_ring, up)

    feature = block * 16 + tl.arange(0, 16)
    row = tl.arange(0, 4)
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
    thread = tl.arange(0, 32)[:, None, None]
    source = scale + (first[None, :, None] + (thread // 4 * 2 + tl.arange(0, 2)[None, None, :]))
    scales = tl.load(source, mask=live[None, :, None], other=0.0)
    zeros = scales
    if ZEROS:
        zeros = tl.reshape(load_zeros(zero, first, live, GROUP), (32, TOGETHER, 2))
    return codes, scales, zeros


@triton.jit
def _multiply(tiles, inputs, ZEROS: tl.constexpr, FAST: tl.constexpr):
    """Each tile's sums, `[tiles, row g or g + 8, g, row of x]`."""
    codes, scales, zeros = tiles
    right, worth, count = inputs
    found = tl.dot(signed_codes(codes, FAST), right, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(found, (codes.shape[0], 2, 8, 4, 2)))
    sums = (high * BASE + low).to(tl.float32)
    if ZEROS:
        sums -= _by_rows(zeros.to(tl.float32) - MIDDLE) * count[:, None, None, :]
    return sums * (_by_rows(scales.to(tl.float32)) * worth[:, None, None, :])


@triton.jit
def _by_rows(of_threads):
    """What thread `4 g + t` has of rows `g` and `g + 8`, as sums have it."""
    together: tl.constexpr = of_threads.shape[1]
    return tl.permute(tl.reshape(of_threads, (8, 4, together, 2)), (2, 3, 0, 1))


@triton.jit
def _finish(sums, bias, feature, BIASED: tl.constexpr, dtype: tl.constexpr):
    """The sums of all warps, rounded."""
    result = tl.reshape(tl.sum(sums, 0), (16, 4))
    if BIASED:
        result += tl.load(bias + feature).to(tl.float32)[:, None]
    return result.to(dtype).to(tl.float32)
