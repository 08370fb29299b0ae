"""The products of experts for more than a few tokens: one launch for all experts.

A program multiplies a block of pairs (`order.py`) with some rows of their expert's matrix. The
weights are the left factor, so that a block may be as small as the tokens of an expert are few:
tensor cores multiply 64 rows at once, of weights, by as few as eight of tokens. So no weight is
read twice before there are more tokens than fit a block, and experts that no token chose are not
read at all.

Of codes with scales in blocks, 64 tokens and more are the left factor themselves: a thread has the
sums of two or four rows and of many columns, and each row of tokens has a scale of its own in every
step, while 128 rows of weights share one.

The first product gathers its tokens and leaves its results by expert; the second takes them so and
puts its own where the pairs belong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.activation import Gating
from quire.kernels.codes import Activations
from quire.kernels.experts import CodedExperts
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.experts.tiles import Tile
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

_LEFT = 64  # rows of a left factor, that tensor cores multiply at once


def gated_product(
    x: Activations,
    weights: Tensor | CodedExperts,
    blocks: Blocks,
    top_k: int,
    activation: Gating,
    bias: Tensor | None,
    tile: Tile,
) -> Tensor:
    """`[pairs, features]` in the order of experts, of weights `[experts, 2 * features, inputs]`."""
    return _product(x, weights, blocks, top_k, activation, bias, tile)


def product(
    x: Activations,
    weights: Tensor | CodedExperts,
    blocks: Blocks,
    bias: Tensor | None,
    tile: Tile,
) -> Tensor:
    """From pairs in the order of experts to `[pairs, outputs]`, token by token; what goes nowhere
    is left as it was."""
    return _product(x, weights, blocks, 1, None, bias, tile)


def _product(
    x: Activations,
    weights: Tensor | CodedExperts,
    blocks: Blocks,
    top_k: int,
    activation: Gating | None,
    bias: Tensor | None,
    tile: Tile,
) -> Tensor:
    """Numbers by numbers, or codes by codes."""
    values, x_scales = (x, None) if isinstance(x, Tensor) else (x.values, x.scales)
    matrix, scales = (weights, None) if isinstance(weights, Tensor) else weights
    gated = activation is not None
    features, size = matrix.shape[1] // (2 if gated else 1), values.shape[1]
    out = torch.empty((len(blocks.order), features), dtype=x.dtype, device=values.device)
    inner = tile.inner
    in_blocks = scales is not None and not scales.is_by_rows
    _multiply[(blocks.number * cdiv(features, tile.columns),)](
        # Pairs that lie by expert are copied by the hardware as weights are.
        values if gated else TensorDescriptor.from_tensor(values, [blocks.size, inner]),
        TensorDescriptor.from_tensor(matrix.flatten(0, 1), [tile.columns, inner]),
        out,
        blocks.order,
        blocks.table,
        out if x_scales is None else x_scales,
        out if scales is None else scales.values,
        out if bias is None else bias,
        blocks.number,
        features,
        size,
        top_k,
        0 if x_scales is None else x_scales.stride(1),
        0 if scales is None else scales.values.stride(0),
        GATED=gated,
        BIASED=bias is not None,
        **gating_of(activation),
        ROW_SCALES=scales is not None and scales.is_by_rows,
        SCALE_ROWS=scales.rows if scales is not None and in_blocks else 0,
        TOKENS_LEFT=in_blocks and blocks.size >= _LEFT,
        BLOCK=blocks.size,
        COLUMNS=tile.columns,
        INNER=inner,
        EVEN=size % inner == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_launch(values.device),
    )
    return out


@triton.jit(do_not_specialize=["most", "top_k", "x_scale_stride"])
def _multiply(
    x,
    weights,
    out,
    order,
    table,
    x_scales,
    scales,
    bias,
    most,
    features,
    size,
    top_k,
    x_scale_stride,
    scale_stride,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TOKENS_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """With `SCALE_ROWS`, so many rows and `INNER` columns share a scale."""
    dtype: tl.constexpr = out.dtype.element_ty
    across = tl.cdiv(features, COLUMNS)
    block = tl.program_id(0) // across  # its programs are neighbours: they read the same tokens
    first = tl.program_id(0) % across * COLUMNS
    trigger_then_wait(PDL)
    expert = tl.load(table + block)
    if expert < 0:
        return
    begin = tl.load(table + most + block)
    place = begin + tl.arange(0, BLOCK)
    is_pair = place < tl.load(table + 2 * most + block)
    pair = tl.load(order + place, mask=is_pair, other=0)
    # A gate's input is a token's, and its results lie by expert; of the second product both turn.
    source = pair // top_k if GATED else place
    target = place if GATED else pair
    halves: tl.constexpr = 2 if GATED else 1
    row = expert * (features * halves) + first
    lane = tl.arange(0, INNER)
    if GATED:
        inputs = x + source.to(tl.int64)[:, None] * size + lane[None, :]
    x_scales += source
    shape: tl.constexpr = (BLOCK, COLUMNS) if TOKENS_LEFT else (COLUMNS, BLOCK)
    sums = tl.zeros(shape, tl.float32)
    more_sums = sums
    for start in range(0, size, INNER):
        if GATED:
            live = is_pair[:, None]
            if not EVEN:
                live &= (start + lane < size)[None, :]
            numbers = tl.load(inputs + start, mask=live, other=0.0)
        else:  # with pairs of the next expert, whose results are not written
            numbers = x.load([begin, start])
        tile = weights.load([row, start])
        if SCALE_ROWS > 0:
            group = start // INNER
            x_scale = tl.load(x_scales + group * x_scale_stride, mask=is_pair, other=0.0)
            scale = tl.load(scales + row // SCALE_ROWS * scale_stride + group)
            sums += _dot(tile, numbers, None, TOKENS_LEFT) * _tokens(x_scale * scale, TOKENS_LEFT)
            if GATED:
                tile = weights.load([row + features, start])
                scale = tl.load(scales + (row + features) // SCALE_ROWS * scale_stride + group)
                found = _dot(tile, numbers, None, TOKENS_LEFT)
                more_sums += found * _tokens(x_scale * scale, TOKENS_LEFT)
        else:
            sums = _dot(tile, numbers, sums, TOKENS_LEFT)
            if GATED:
                tile = weights.load([row + features, start])
                more_sums = _dot(tile, numbers, more_sums, TOKENS_LEFT)
    column = first + tl.arange(0, COLUMNS)
    is_column = column < features
    if ROW_SCALES:
        x_scale = _tokens(tl.load(x_scales, mask=is_pair, other=0.0), TOKENS_LEFT)
        of_row = scales + row + tl.arange(0, COLUMNS)
        sums *= x_scale * _features(tl.load(of_row, mask=is_column, other=0.0), TOKENS_LEFT)
        if GATED:
            scale = tl.load(of_row + features, mask=is_column, other=0.0)
            more_sums *= x_scale * _features(scale, TOKENS_LEFT)
    if BIASED:
        of_row = bias + row + tl.arange(0, COLUMNS)
        added = tl.load(of_row, mask=is_column, other=0.0)
        sums += _features(added.to(tl.float32), TOKENS_LEFT)
        if GATED:
            added = tl.load(of_row + features, mask=is_column, other=0.0)
            more_sums += _features(added.to(tl.float32), TOKENS_LEFT)
    result = sums.to(dtype)
    if GATED:
        result = join(sums, more_sums, dtype, GELU, CLAMPED, ALPHA, LIMIT)
    if not TOKENS_LEFT:
        result = tl.trans(result)
    to = out + target.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(to, result, mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _dot(tile, numbers, sums, TOKENS_LEFT: tl.constexpr):
    """Of weights and tokens, both with the inputs in their rows."""
    if TOKENS_LEFT:
        return tl.dot(numbers, tl.trans(tile), sums, input_precision="ieee")
    else:
        return tl.dot(tile, tl.trans(numbers), sums, input_precision="ieee")


@triton.jit
def _tokens(values, TOKENS_LEFT: tl.constexpr):
    """What each token has one of, beside the sums."""
    if TOKENS_LEFT:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def _features(values, TOKENS_LEFT: tl.constexpr):
    if TOKENS_LEFT:
        return values[None, :]
    else:
        return values[:, None]
