"""`grouped.py` for weights of four bits, which become numbers in registers.

How they lie is said in `kernels/four_bits.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.activation import Gating
from quire.kernels.four_bits import GROUP, FourBitExperts
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.experts.tiles import Tile
from quire.kernels.triton.experts.unpack import DIVISOR, e2m1_numbers, whole_numbers
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

NAMES = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def gated_product(
    x: Tensor,
    weights: FourBitExperts,
    blocks: Blocks,
    top_k: int,
    activation: Gating,
    bias: Tensor | None,
    tile: Tile,
) -> Tensor:
    """`[pairs, features]` in the order of experts."""
    return _product(x, weights, blocks, top_k, activation, bias, tile)


def product(
    x: Tensor, weights: FourBitExperts, blocks: Blocks, bias: Tensor | None, tile: Tile
) -> Tensor:
    """From pairs in the order of experts to `[pairs, outputs]`, token by token; what goes nowhere
    is left as it was."""
    return _product(x, weights, blocks, 1, None, bias, tile)


def _product(
    x: Tensor,
    weights: FourBitExperts,
    blocks: Blocks,
    top_k: int,
    activation: Gating | None,
    bias: Tensor | None,
    tile: Tile,
) -> Tensor:
    codes, words, scale_dtype, zeros = weights
    gated = activation is not None
    features = codes.shape[1] // (2 if gated else 1)
    out = torch.empty((len(blocks.order), features), dtype=x.dtype, device=x.device)
    _multiply[(blocks.number * cdiv(features, tile.columns),)](
        x,
        TensorDescriptor.from_tensor(codes.flatten(0, 1), [tile.columns, GROUP]),
        words,
        words if zeros is None else zeros,
        out if bias is None else bias,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        features,
        x.shape[1],
        codes.shape[2],
        top_k,
        GATED=gated,
        BIASED=bias is not None,
        **gating_of(activation),
        GROUP=GROUP,
        BLOCK=blocks.size,
        COLUMNS=tile.columns,
        SCALE=NAMES[scale_dtype],
        ZEROS=zeros is not None,
        FAST=is_fast(x) and scale_dtype in (None, x.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_launch(x.device),
    )
    return out


def is_fast(x: Tensor) -> bool:
    """Whether the device multiplies pairs of bfloat16."""
    return (
        x.dtype == torch.bfloat16
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] >= 9
    )


@triton.jit(do_not_specialize=["most", "top_k"])
def _multiply(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    order,
    table,
    most,
    features,
    size,
    quarter,
    top_k,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    across = tl.cdiv(features, COLUMNS)
    block = tl.program_id(0) // across  # its programs are neighbours: they read the same tokens
    first = tl.program_id(0) % across * COLUMNS
    trigger_then_wait(PDL)
    expert = tl.load(table + block)
    if expert < 0:
        return
    place = tl.load(table + most + block) + tl.arange(0, BLOCK)
    is_pair = place < tl.load(table + 2 * most + block)
    pair = tl.load(order + place, mask=is_pair, other=0)
    # A gate's input is a token's, and its results lie by expert; of the second product both turn.
    source = pair // top_k if GATED else place
    target = place if GATED else pair
    height = features * 2 if GATED else features
    column = first + tl.arange(0, COLUMNS)
    is_column = column < features
    lane = tl.arange(0, GROUP)
    inputs = x + source.to(tl.int64)[:, None] * size + lane[None, :]
    row = expert * height + first
    words_of_step: tl.constexpr = 1 if SCALE is None else 2
    steps = quarter // GROUP
    scales += expert.to(tl.int64) * height * steps * words_of_step + column
    zeros += expert.to(tl.int64) * height * steps * words_of_step + column
    sums = tl.zeros((COLUMNS, BLOCK), tl.float32)
    more_sums = sums
    for start in range(0, quarter, GROUP):
        tile = codes.load([row, start])
        words = _load_words(scales, height, is_column, SCALE)
        zero = _load_zeros(zeros, height, is_column, SCALE, ZEROS)
        more_tile, more_words, more_zero = tile, words, zero
        if GATED:
            more_tile = codes.load([row + features, start])
            more_words = _load_words(scales + features, height, is_column, SCALE)
            more_zero = _load_zeros(zeros + features, height, is_column, SCALE, ZEROS)
        scales += height * words_of_step
        zeros += height * words_of_step
        for which in tl.static_range(4):
            at = which * quarter + start
            live = is_pair[:, None] & (at + lane < size)[None, :]
            values = tl.trans(tl.load(inputs + at, mask=live, other=0.0))
            numbers = _numbers(tile, words, zero, which, SCALE, FAST, dtype)
            sums = tl.dot(numbers, values, sums)
            if GATED:
                numbers = _numbers(more_tile, more_words, more_zero, which, SCALE, FAST, dtype)
                more_sums = tl.dot(numbers, values, more_sums)
    if FAST and SCALE is None:
        sums *= DIVISOR
        more_sums *= DIVISOR
    if BIASED:
        of_row = bias + row + tl.arange(0, COLUMNS)
        sums += tl.load(of_row, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if GATED:
            added = tl.load(of_row + features, mask=is_column, other=0.0)
            more_sums += added.to(tl.float32)[:, None]
    result = sums.to(dtype)
    if GATED:
        result = join(sums, more_sums, dtype, GELU, CLAMPED, ALPHA, LIMIT)
    to = out + target.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(to, tl.trans(result), mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _load_words(words, height, is_row, SCALE: tl.constexpr):
    """Of the first two quarters, and of the others."""
    first = tl.load(words, mask=is_row, other=0)
    second = first
    if SCALE is not None:
        second = tl.load(words + height, mask=is_row, other=0)
    return first, second


@triton.jit
def _load_zeros(zeros, height, is_row, SCALE: tl.constexpr, ZEROS: tl.constexpr):
    """The same of zeros; where there are none, the middle code."""
    first = tl.full(is_row.shape, 0x00080008, tl.int32)
    second = first
    if ZEROS:
        first, second = _load_words(zeros, height, is_row, SCALE)
    return first, second


@triton.jit
def _numbers(
    tile,
    words,
    zeros,
    QUARTER: tl.constexpr,
    SCALE: tl.constexpr,
    FAST: tl.constexpr,
    dtype: tl.constexpr,
):
    """Of one quarter of a tile."""
    if SCALE is None:
        numbers = e2m1_numbers(tile, words[0], QUARTER, FAST, dtype)
    else:
        pair: tl.constexpr = QUARTER // 2
        numbers = whole_numbers(tile, words[pair], zeros[pair], QUARTER, SCALE, FAST, dtype)
    return numbers
