"""`few.py` for MXFP4: an eighth of the bytes of float32, so as fast as codes are taken apart.

How they lie is said in `kernels/four_bits.py`. Codes become numbers of 16 bits two at a time, and
tensor cores multiply these, for which the weights of a few rows stand on the left: with float32 in
registers instead, a weight took three times as many instructions. Tensor cores want eight columns
on the right, which are a token's chosen experts in the second product, each with its own input; in
the first there is one input, eight times. The warps of a program share the columns of its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.experts import Routing
from quire.kernels.four_bits import GROUP, FourBitExperts
from quire.kernels.triton.attention.tiles import fetch
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.grouped_fours import is_fast
from quire.kernels.triton.experts.tiles import FewShape
from quire.kernels.triton.experts.unpack import DIVISOR, e2m1_numbers
from quire.kernels.triton.gemv import load_bias
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger

_INPUTS = 8  # what tensor cores take on the right, at least …
_ROWS = 16  # … and on the left
_STAGES = 3
_GROUP = tl.constexpr(GROUP)
_LINE = tl.constexpr(64)  # elements that come from memory together


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
    together = max(shape.together, _ROWS // 2)
    _gated[(triton.cdiv(features, together), tokens * top_k)](
        x,
        weights.codes,
        weights.words,
        routing.experts,
        out if bias is None else bias,
        out,
        x.stride(0),
        count,
        features,
        x.shape[1],
        quarter,
        TOP_K=top_k,
        TOGETHER=together,
        INPUTS=_INPUTS,
        PARTS=shape.warps,
        BIASED=bias is not None,
        **gating_of(activation),
        FAST=is_fast(x),
        num_warps=shape.warps,
        num_stages=_STAGES,
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
    choices = triton.next_power_of_2(top_k)
    together = max(shape.together, _ROWS // choices)
    _summed[(triton.cdiv(features, together), tokens)](
        x,
        weights.codes,
        weights.words,
        routing.experts,
        routing.weights,
        out if bias is None else bias,
        out,
        count,
        features,
        x.shape[1],
        quarter,
        TOP_K=top_k,
        CHOICES=choices,
        TOGETHER=together,
        INPUTS=max(_INPUTS, choices),
        PARTS=shape.warps,
        BIASED=bias is not None,
        FAST=is_fast(x),
        num_warps=shape.warps,
        num_stages=_STAGES,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _gated(
    x,
    codes,
    exponents,
    experts,
    bias,
    out,
    x_stride,
    count,
    features,
    size,
    quarter,
    TOP_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows are those of the gate, then as many of up."""
    dtype: tl.constexpr = out.dtype.element_ty
    pair = tl.program_id(1).to(tl.int64)
    which = tl.arange(0, 2 * TOGETHER)
    feature = tl.program_id(0) * TOGETHER + which % TOGETHER
    live = feature < features
    row = feature + which // TOGETHER * features
    wait_then_trigger(PDL)
    expert = tl.load(experts + pair)
    if (expert < 0) | (expert >= count):
        return
    height = 2 * features
    added = load_bias(bias + expert * height, row, live, BIASED)
    steps = quarter // _GROUP
    inputs = x + pair // TOP_K * x_stride + tl.zeros((INPUTS,), tl.int32)
    is_input = tl.arange(0, INPUTS) >= 0
    sums = _multiply(
        codes + (expert * height + row) * quarter,
        exponents + expert * height * steps + row,
        live,
        inputs,
        is_input,
        height,
        size,
        quarter,
        PARTS,
        FAST,
        dtype,
    )
    result = tl.sum(tl.where((tl.arange(0, INPUTS) == 0)[None, :], sums, 0.0), 1) + added
    gate, up = tl.split(tl.trans(tl.reshape(result, (2, TOGETHER))))
    feature = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    joined = join(gate, up, dtype, GELU, CLAMPED, ALPHA, LIMIT)
    tl.store(out + pair * features + feature, joined, mask=feature < features)


@triton.jit(do_not_specialize=["count"])
def _summed(
    x,
    codes,
    exponents,
    experts,
    shares,
    bias,
    out,
    count,
    features,
    size,
    quarter,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows are the same features of each of a token's experts, whose input is a column."""
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    which = tl.arange(0, CHOICES * TOGETHER)
    choice = which // TOGETHER
    feature = tl.program_id(0) * TOGETHER + which % TOGETHER
    expert = tl.load(experts + token * TOP_K + choice, mask=choice < TOP_K, other=-1)
    is_expert = (expert >= 0) & (expert < count)
    expert = tl.where(is_expert, expert, 0)
    live = is_expert & (feature < features)
    row = expert * features + feature
    source = codes + row * quarter
    added = load_bias(bias, row, live, BIASED)
    column = tl.arange(0, INPUTS)
    pair = token * TOP_K + column
    chosen = tl.load(experts + pair, mask=column < TOP_K, other=-1)
    is_input = (chosen >= 0) & (chosen < count)
    share = tl.load(shares + pair, mask=is_input, other=0.0).to(tl.float32)
    if PDL:
        line = tl.arange(0, 2 * PARTS * _GROUP // _LINE) * _LINE
        wanted = live[:, None] & (line < quarter)[None, :]
        fetch(source[:, None] + line[None, :], wanted.to(tl.int32))
    trigger_then_wait(PDL)
    sums = _multiply(
        source,
        exponents + expert * features * (quarter // _GROUP) + feature,
        live,
        x + pair * size,
        is_input,  # what no expert found was never written, and may be anything
        features,
        size,
        quarter,
        PARTS,
        FAST,
        dtype,
    )
    mine = choice[:, None] == column[None, :]
    found = tl.where(mine, (sums + added[:, None]) * share[None, :], 0.0)
    total = tl.sum(tl.reshape(tl.sum(found, 1), (CHOICES, TOGETHER)), 0)
    feature = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    tl.store(out + token * features + feature, total.to(dtype), mask=feature < features)


@triton.jit
def _multiply(
    rows,
    exponents,
    live,
    inputs,
    is_input,
    height,
    size,
    quarter,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
    dtype: tl.constexpr,
):
    """The products of rows, each of which begins at a pointer, with inputs that do likewise."""
    ROWS: tl.constexpr = rows.shape[0]
    INPUTS: tl.constexpr = inputs.shape[0]
    part = tl.arange(0, PARTS)
    column = part[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    source = rows[None, :, None] + column[:, None, :]
    powers = exponents[None, :] + part[:, None] * height
    place = tl.broadcast_to(column[:, :, None], (PARTS, _GROUP, INPUTS))
    values_of = inputs[None, None, :] + place
    sums = tl.zeros((PARTS, ROWS, INPUTS), tl.float32)
    for start in range(0, quarter, PARTS * _GROUP):
        mask = live[None, :, None] & (start + column < quarter)[:, None, :]
        tile = tl.load(source + start, mask=mask, other=0, eviction_policy="evict_first")
        mask = live[None, :] & (start + part * _GROUP < quarter)[:, None]
        power = tl.load(powers, mask=mask, other=0)
        powers += PARTS * height
        for which in tl.static_range(4):
            at = which * quarter + start
            # Behind its quarter a column has codes of zero.
            mask = is_input[None, None, :] & (at + place < size)
            values = tl.load(values_of + at, mask=mask, other=0.0)
            sums = tl.dot(e2m1_numbers(tile, power, which, FAST, dtype), values, sums)
    total = tl.sum(sums, 0)
    return total * DIVISOR if FAST else total
