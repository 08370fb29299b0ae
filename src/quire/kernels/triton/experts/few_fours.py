"""`few.py` for four bits: an eighth of the bytes of float32, so as fast as codes are taken apart.

Columns are counted in words, each of two elements of 16 bits: the codes of two columns in each
quarter of a row (`kernels/four_bits.py`). Activations stay as they are.

A whole number's code makes 128 + code of bfloat16's bits for 128. Of these a thread adds up the
products with its columns, less (128 + zero) times the sum of its activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.experts import Routing
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.codes.gemv import half_of
from quire.kernels.triton.experts.few import chosen, load_rows
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.grouped_fours import NAMES
from quire.kernels.triton.experts.tiles import FewShape
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_VECTOR = 4  # words that a thread reads at once, and as many of x in each quarter
_STEP = tl.constexpr(16)  # words whose scales are one
# Codes become numbers divided by 2 ** 126: activations are multiplied by half of that, for products
# to have all of their bits, and sums by the rest with their scales.
_IN_INPUTS, _IN_SCALES = tl.constexpr(2.0**64), tl.constexpr(62)
_BITS = tl.constexpr(0x81C081C0 - (1 << 32))  # where bfloat16 has sign, exponent and fraction
_CODES, _BASE = tl.constexpr(0x000F000F), tl.constexpr(0x43004300)  # whole numbers; 128 twice
_HIGH = tl.constexpr(-(1 << 16))


def few_gated(
    x: Tensor,
    weights: FourBitExperts,
    routing: Routing,
    activation: Gating,
    bias: Tensor | None,
    shape: FewShape,
) -> Tensor:
    """`[pairs, features]`, token by token; where there is no expert, it is left as it was."""
    count, height, quarter = weights.codes.shape
    features, (tokens, top_k) = height // 2, routing.experts.shape
    out = torch.empty((tokens * top_k, features), dtype=x.dtype, device=x.device)
    _gated[(cdiv(features, shape.together), tokens * top_k)](
        x.view(torch.int32),
        weights.codes.view(torch.int32),
        weights.words,
        weights.words if weights.zeros is None else weights.zeros,
        routing.experts,
        out if bias is None else bias,
        out,
        x.stride(0) // 2,
        count,
        features,
        x.shape[1] // 2,
        quarter // 2,
        TOP_K=top_k,
        TOGETHER=shape.together,
        TILE=shape.tile,
        VECTOR=_VECTOR,
        BIASED=bias is not None,
        SCALE=NAMES[weights.scale_dtype],
        ZEROS=weights.zeros is not None,
        **gating_of(activation),
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


def few_summed(
    x: Tensor, weights: FourBitExperts, routing: Routing, bias: Tensor | None, shape: FewShape
) -> Tensor:
    """The weighted sum of each token's second products: `[tokens, outputs]`."""
    count, features, quarter = weights.codes.shape
    tokens, top_k = routing.experts.shape
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    _summed[(cdiv(features, shape.together), tokens)](
        x.view(torch.int32),
        weights.codes.view(torch.int32),
        weights.words,
        weights.words if weights.zeros is None else weights.zeros,
        routing.experts,
        routing.weights,
        out if bias is None else bias,
        out,
        count,
        features,
        x.shape[1] // 2,
        quarter // 2,
        TOP_K=top_k,
        CHOICES=next_power_of_2(top_k),
        TOGETHER=shape.together,
        TILE=shape.tile,
        VECTOR=_VECTOR,
        BIASED=bias is not None,
        SCALE=NAMES[weights.scale_dtype],
        ZEROS=weights.zeros is not None,
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _gated(
    x,
    weights,
    scales,
    zeros,
    experts,
    bias,
    out,
    x_stride,
    count,
    features,
    pairs,
    words,
    TOP_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BIASED: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of gate and up are one dimension of a tile, features another."""
    dtype: tl.constexpr = out.dtype.element_ty
    feature = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    pair = tl.program_id(1).to(tl.int64)
    lane = tl.max_contiguous(tl.arange(0, TILE), VECTOR)
    vector = tl.arange(0, TILE // VECTOR) * VECTOR
    wait_then_trigger(PDL)
    expert = tl.load(experts + pair)
    if (expert < 0) | (expert >= count):
        return
    height = 2 * features
    row = tl.arange(0, 2)[:, None] * features + feature[None, :]
    live = (row >= 0) & (feature < features)[None, :]
    source = weights + (expert * height + row)[:, :, None] * words + lane[None, None, :]
    first = expert * height * (tl.cdiv(words, _STEP) * _words_of_step(SCALE)) + row
    scales += first
    zeros += first
    inputs = x + pair // TOP_K * x_stride + lane
    tile = load_rows(source, live, lane < words)
    sums = tl.zeros((2, TOGETHER, TILE // VECTOR), tl.float32)
    for start in range(0, words, TILE):
        next_tile = load_rows(source + (start + TILE), live, start + TILE + lane < words)
        groups = _load_groups(scales, zeros, live, start + vector, words, height, SCALE, ZEROS)
        column = start + lane
        for which in tl.static_range(4):
            is_value = which * words + column < pairs
            values = tl.load(inputs + which * words + start, mask=is_value, other=0)
            sums += _multiply(tile, values[None, None, :], groups, which, dtype, VECTOR, SCALE)
        tile = next_tile
    result = tl.sum(sums, 2)
    if BIASED:
        added = tl.load(bias + expert * height + row, mask=live, other=0.0)
        result += added.to(tl.float32)
    gate, up = tl.split(tl.trans(result))
    to = out + pair * features + feature
    joined = join(gate, up, dtype, GELU, CLAMPED, ALPHA, LIMIT)
    tl.store(to, joined, mask=feature < features)


@triton.jit(do_not_specialize=["count"])
def _summed(
    x,
    weights,
    scales,
    zeros,
    experts,
    shares,
    bias,
    out,
    count,
    features,
    pairs,
    words,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BIASED: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
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
    first = expert[:, None] * features * (tl.cdiv(words, _STEP) * _words_of_step(SCALE))
    first += feature[None, :]
    scales += first
    zeros += first
    tile = load_rows(source, live, lane < words)
    trigger_then_wait(PDL)
    inputs = x + pair[:, None] * pairs + lane[None, :]
    sums = tl.zeros((CHOICES, TOGETHER, TILE // VECTOR), tl.float32)
    for start in range(0, words, TILE):
        next_tile = load_rows(source + (start + TILE), live, start + TILE + lane < words)
        groups = _load_groups(scales, zeros, live, start + vector, words, features, SCALE, ZEROS)
        # What no expert found was never written, and may be anything.
        column = start + lane
        for which in tl.static_range(4):
            is_value = is_expert[:, None] & (which * words + column < pairs)[None, :]
            values = tl.load(inputs + which * words + start, mask=is_value, other=0)
            sums += _multiply(tile, values[:, None, :], groups, which, dtype, VECTOR, SCALE)
        tile = next_tile
    found = tl.sum(sums, 2)
    if BIASED:
        found += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
    total = tl.sum(found * share[:, None], 0)
    tl.store(out + token * features + feature, total.to(dtype), mask=feature < features)


@triton.jit
def _words_of_step(SCALE: tl.constexpr):
    return 1 if SCALE is None else 2


@triton.jit
def _load_groups(
    scales, zeros, rows_live, word, words, height, SCALE: tl.constexpr, ZEROS: tl.constexpr
):
    """The scales of each thread's vectors in all quarters, and their zeros: of the first two
    quarters, and of the others."""
    of_step: tl.constexpr = _words_of_step(SCALE)
    mask = rows_live[:, :, None] & (word < words)[None, None, :]
    place = (word // _STEP * (of_step * height))[None, None, :]
    first = tl.load(scales[:, :, None] + place, mask=mask, other=0)
    second, first_zeros, second_zeros = first, first, first
    if SCALE is not None:
        second = tl.load(scales[:, :, None] + (place + height), mask=mask, other=0)
        first_zeros = tl.full(first.shape, 0x00080008, tl.int32)
        second_zeros = first_zeros
        if ZEROS:
            first_zeros = tl.load(zeros[:, :, None] + place, mask=mask, other=0)
            second_zeros = tl.load(zeros[:, :, None] + (place + height), mask=mask, other=0)
    return first, second, first_zeros, second_zeros


@triton.jit
def _multiply(
    tile,
    values,
    groups,
    QUARTER: tl.constexpr,
    dtype: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The sums over each thread's own columns of a quarter."""
    if SCALE is None:
        found = _times_e2m1(tile, values, groups[0], QUARTER, dtype, VECTOR)
    else:
        pair: tl.constexpr = QUARTER // 2
        words, zeros = groups[pair], groups[2 + pair]
        found = _times_whole(tile, values, words, zeros, QUARTER, dtype, VECTOR, SCALE)
    return found


@triton.jit
def _times_e2m1(
    tile, values, words, QUARTER: tl.constexpr, dtype: tl.constexpr, VECTOR: tl.constexpr
):
    """Times two to the exponents, of which 127 is 1, and what numbers are yet divided by."""
    if QUARTER < 3:  # noqa: SIM108
        codes = (tile << (3 * QUARTER)) & _BITS
    else:
        codes = (((tile >> 7) & 0x00D800D8) * 0x821) & _BITS
    low = half_of(values, 0, dtype) * _IN_INPUTS
    sums = _by_vector(_products(codes, low, half_of(values, 16, dtype) * _IN_INPUTS), VECTOR)
    bits = (((words >> (8 * QUARTER)) & 255) + _IN_SCALES) << 23
    return sums * bits.to(tl.float32, bitcast=True)


@triton.jit
def _times_whole(
    tile,
    values,
    words,
    zeros,
    QUARTER: tl.constexpr,
    dtype: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE: tl.constexpr,
):
    shift: tl.constexpr = QUARTER % 2 * 16
    low, high = half_of(values, 0, dtype), half_of(values, 16, dtype)
    sums = _by_vector(_products(((tile >> (4 * QUARTER)) & _CODES) | _BASE, low, high), VECTOR)
    zero = (128 + ((zeros >> shift) & 255)).to(tl.float32)
    scale = (words >> shift).to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)
    return (sums - zero * _by_vector(low + high, VECTOR)) * scale


@triton.jit
def _products(codes, low, high):
    """Of two numbers each in a word of codes, in bfloat16."""
    products = (codes << 16).to(tl.float32, bitcast=True) * low
    return products + (codes & _HIGH).to(tl.float32, bitcast=True) * high


@triton.jit
def _by_vector(products, VECTOR: tl.constexpr):
    a: tl.constexpr = products.shape[0]
    b: tl.constexpr = products.shape[1]
    c: tl.constexpr = products.shape[2]
    return tl.sum(tl.reshape(products, (a, b, c // VECTOR, VECTOR)), 3)
