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
from quire.kernels.triton.experts.unpack import DIVISOR, unpacked
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait

_NAMES = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    _multiply[(blocks.number * triton.cdiv(features, tile.columns),)](
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
        top_k,
        GATED=gated,
        BIASED=bias is not None,
        **gating_of(activation),
        GROUP=GROUP,
        BLOCK=blocks.size,
        COLUMNS=tile.columns,
        SCALE=_NAMES[scale_dtype],
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
    half = size // 2
    lane = tl.arange(0, GROUP)
    inputs = x + source.to(tl.int64)[:, None] * size + lane[None, :]
    row = expert * height + first
    first_word = expert.to(tl.int64) * height * tl.cdiv(half, 2 * GROUP) + column
    sums = tl.zeros((COLUMNS, BLOCK), tl.float32)
    more_sums = sums
    for start in range(0, half, 2 * GROUP):
        word = tl.load(scales + first_word, mask=is_column, other=0)
        more_word = word
        if GATED:
            more_word = tl.load(scales + features + first_word, mask=is_column, other=0)
        zero = tl.full((COLUMNS,), 0x00080008, tl.int32)
        more_zero = zero
        if ZEROS:
            zero = tl.load(zeros + first_word, mask=is_column, other=0)
            if GATED:
                more_zero = tl.load(zeros + features + first_word, mask=is_column, other=0)
        first_word += height
        for part in tl.static_range(2):
            at = start + part * GROUP
            live = is_pair[:, None] & (at + lane < half)[None, :]
            low = tl.trans(tl.load(inputs + at, mask=live, other=0.0))
            high = tl.trans(tl.load(inputs + half + at, mask=live, other=0.0))
            tile = codes.load([row, at])
            numbers = unpacked(tile, word, zero, part, SCALE, FAST, dtype)
            sums = tl.dot(numbers, low, sums)
            numbers = unpacked(tile, word, zero, part + 2, SCALE, FAST, dtype)
            sums = tl.dot(numbers, high, sums)
            if GATED:
                tile = codes.load([row + features, at])
                numbers = unpacked(tile, more_word, more_zero, part, SCALE, FAST, dtype)
                more_sums = tl.dot(numbers, low, more_sums)
                numbers = unpacked(tile, more_word, more_zero, part + 2, SCALE, FAST, dtype)
                more_sums = tl.dot(numbers, high, more_sums)
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
