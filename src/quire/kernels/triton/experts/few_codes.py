"""`few.py` for weights that are codes of eight bits: half the bytes, so twice as fast.

As in `codes/gemv.py`, activations stay as they are, and columns are counted in words of four codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.experts import CodedExperts, Routing
from quire.kernels.fp8 import FP8
from quire.kernels.triton.attention.fp8_pairs import has_conversion
from quire.kernels.triton.codes.gemv import (
    half_of,
    load_scales,
    load_words,
    multiply_words,
    unpack_words,
)
from quire.kernels.triton.experts.few import chosen, load_rows
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.tiles import FewShape
from quire.kernels.triton.gemv import load_bias
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_VECTOR = 2  # words that a thread reads at once, for which it reads 16 bytes of x


def few_gated(
    x: Tensor,
    weights: CodedExperts,
    routing: Routing,
    activation: Gating,
    bias: Tensor | None,
    shape: FewShape,
) -> Tensor:
    """`[pairs, features]`, token by token; where there is no expert, it is left as it was."""
    codes, scales = weights
    count, height, columns = codes.shape
    features, (tokens, top_k) = height // 2, routing.experts.shape
    out = torch.empty((tokens * top_k, features), dtype=x.dtype, device=x.device)
    _gated[(cdiv(features, shape.together), tokens * top_k)](
        x.view(torch.int64),
        codes.view(torch.int32),
        scales.values,
        routing.experts,
        out if bias is None else bias,
        out,
        x.stride(0) // 4,
        count,
        features,
        columns // 4,
        scales.values.stride(0),
        TOP_K=top_k,
        TOGETHER=shape.together,
        TILE=shape.tile // 4,
        VECTOR=_VECTOR,
        SCALE_ROWS=scales.rows,
        SCALE_COLUMNS=0 if scales.is_by_rows else scales.columns,
        FP8=codes.dtype == FP8,
        BIASED=bias is not None,
        **gating_of(activation),
        IS_ASM=has_conversion(x.device),
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


def few_summed(
    x: Tensor, weights: CodedExperts, routing: Routing, bias: Tensor | None, shape: FewShape
) -> Tensor:
    """The weighted sum of each token's second products: `[tokens, outputs]`."""
    codes, scales = weights
    count, features, columns = codes.shape
    tokens, top_k = routing.experts.shape
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    _summed[(cdiv(features, shape.together), tokens)](
        x.view(torch.int64),
        codes.view(torch.int32),
        scales.values,
        routing.experts,
        routing.weights,
        out if bias is None else bias,
        out,
        count,
        features,
        columns // 4,
        scales.values.stride(0),
        TOP_K=top_k,
        CHOICES=next_power_of_2(top_k),
        TOGETHER=shape.together,
        TILE=shape.tile // 4,
        VECTOR=_VECTOR,
        BIASED=bias is not None,
        SCALE_ROWS=scales.rows,
        SCALE_COLUMNS=0 if scales.is_by_rows else scales.columns,
        FP8=codes.dtype == FP8,
        IS_ASM=has_conversion(x.device),
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _gated(
    x,
    weights,
    scales,
    experts,
    bias,
    out,
    x_stride,
    count,
    features,
    words,
    scale_stride,
    TOP_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * TOGETHER
    pair = tl.program_id(1).to(tl.int64)
    # Rows alternate: gate, up, gate, up.
    which = tl.arange(0, TOGETHER * 2)
    feature = first + which // 2
    live = feature < features
    lane = tl.max_contiguous(tl.arange(0, TILE), VECTOR)
    vector = tl.arange(0, TILE // VECTOR) * VECTOR
    wait_then_trigger(PDL)
    expert = tl.load(experts + pair)
    if (expert < 0) | (expert >= count):
        return
    row = expert * (2 * features) + feature + (which % 2) * features
    source = weights + row[:, None] * words + lane[None, :]
    scale_row = scales + row // SCALE_ROWS * scale_stride
    inputs = x + pair // TOP_K * x_stride + lane
    tile = load_words(source, live, lane < words)
    added = load_bias(bias, row, live, BIASED)
    if SCALE_COLUMNS == 0:
        scale = tl.load(scale_row, mask=live, other=0.0)
    sums = tl.zeros((TOGETHER * 2, TILE // VECTOR), tl.float32)
    for start in range(0, words, TILE):
        next_tile = load_words(source + (start + TILE), live, start + TILE + lane < words)
        a, b, c, d = unpack_words(tile, FP8, IS_ASM)
        values = tl.load(inputs + start, mask=start + lane < words, other=0)
        products = multiply_words(a, b, c, d, values, dtype, VECTOR)
        if SCALE_COLUMNS > 0:
            products *= load_scales(scale_row, live, start + vector, words, SCALE_COLUMNS)
        sums += products
        tile = next_tile
    result = tl.sum(sums, 1)
    if SCALE_COLUMNS == 0:
        result *= scale
    gate, up = tl.split(tl.reshape(result + added, (TOGETHER, 2)))
    feature = first + tl.arange(0, TOGETHER)
    to = out + pair * features + feature
    tl.store(to, join(gate, up, dtype, GELU, CLAMPED, ALPHA, LIMIT), mask=feature < features)


@triton.jit(do_not_specialize=["count"])
def _summed(
    x,
    weights,
    scales,
    experts,
    shares,
    bias,
    out,
    count,
    features,
    words,
    scale_stride,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BIASED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    IS_ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    lane = tl.max_contiguous(tl.arange(0, TILE), VECTOR)
    vector = tl.arange(0, TILE // VECTOR) * VECTOR
    pair, expert, share, is_expert = chosen(experts, shares, token, count, TOP_K, CHOICES)
    row = expert[:, None] * features + feature[None, :]
    live = is_expert[:, None] & (feature < features)[None, :]
    source = weights + row[:, :, None] * words + lane[None, None, :]
    scale_row = scales + row // SCALE_ROWS * scale_stride
    tile = load_rows(source, live, lane < words)
    added = load_bias(bias, row, live, BIASED)
    if SCALE_COLUMNS == 0:
        scale = tl.load(scale_row, mask=live, other=0.0)
    trigger_then_wait(PDL)
    inputs = x + pair[:, None] * words + lane[None, :]
    sums = tl.zeros((CHOICES, TOGETHER, TILE // VECTOR), tl.float32)
    for start in range(0, words, TILE):
        next_tile = load_rows(source + (start + TILE), live, start + TILE + lane < words)
        # What no expert found was never written, and may be anything.
        is_value = is_expert[:, None] & (start + lane < words)[None, :]
        values = tl.load(inputs + start, mask=is_value, other=0)
        a, b, c, d = unpack_words(tile, FP8, IS_ASM)
        products = a * half_of(values, 0, dtype)[:, None, :]
        products += b * half_of(values, 16, dtype)[:, None, :]
        products += c * half_of(values, 32, dtype)[:, None, :]
        products += d * half_of(values, 48, dtype)[:, None, :]
        by_vector = tl.sum(tl.reshape(products, (CHOICES, TOGETHER, TILE // VECTOR, VECTOR)), 3)
        if SCALE_COLUMNS > 0:
            group = (start + vector) * 4 // SCALE_COLUMNS
            mask = live[:, :, None] & (start + vector < words)[None, None, :]
            source_of_scale = scale_row[:, :, None] + group[None, None, :]
            by_vector *= tl.load(source_of_scale, mask=mask, other=0.0)
        sums += by_vector
        tile = next_tile
    found = tl.sum(sums, 2)
    if SCALE_COLUMNS == 0:
        found *= scale
    total = tl.sum((found + added) * share[:, None], 0)
    tl.store(out + token * features + feature, total.to(dtype), mask=feature < features)
