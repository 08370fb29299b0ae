"""The products of experts for few tokens: as fast as the weights of the chosen ones are read.

As in `gemv.py`, a program multiplies a few rows of a matrix. In the first product these are of one
expert, and one token's. In the second they are the same rows of all experts of a token, so that
their results are weighted and added in registers. Which experts these are was known before the
first product began: the second asks for its first weights before it is done (`pdl.py`).

Shared experts, which every token goes through, are more of the same in both products: an MLP as
wide as two experts is two of them, which no router chose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.experts import Routing
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.tiles import FewShape
from quire.kernels.triton.gemv import load_bias, load_once, multiply_tile
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_VECTOR = 8  # weights that a thread reads at once, 16 bytes


def few_gated(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    activation: Gating,
    bias: Tensor | None,
    shape: FewShape,
    shared: Tensor | None = None,
) -> Tensor:
    """`[pairs, features]`, token by token; where there is no expert, it is left as it was. Those of
    `shared` experts, whose gates lie before all of their up rows, are behind all others."""
    count, height, columns = weights.shape
    features, (tokens, top_k) = height // 2, routing.experts.shape
    as_many = 0 if shared is None else len(shared) // height
    pairs = tokens * (top_k + as_many)
    out = torch.empty((pairs, features), dtype=x.dtype, device=x.device)
    _gated[(cdiv(features, shape.together), pairs)](
        x,
        weights,
        weights if shared is None else shared,
        routing.experts,
        out if bias is None else bias,
        out,
        x.stride(0),
        tokens * top_k,
        count,
        features,
        columns,
        TOP_K=top_k,
        SHARED=as_many,
        TOGETHER=shape.together,
        TILE=shape.tile,
        VECTOR=_VECTOR,
        BIASED=bias is not None,
        **gating_of(activation),
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


def few_summed(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    bias: Tensor | None,
    shape: FewShape,
    shared: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's second products, and that of `shared` experts with it, whose
    columns lie side by side: `[tokens, outputs]`."""
    count, features, columns = weights.shape
    as_many = 0 if shared is None else shared.shape[1] // columns
    tokens, top_k = routing.experts.shape
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    _summed[(cdiv(features, shape.together), tokens)](
        x,
        weights,
        weights if shared is None else shared,
        routing.experts,
        routing.weights,
        out if bias is None else bias,
        out,
        count,
        features,
        columns,
        TOP_K=top_k,
        SHARED=as_many,
        CHOICES=next_power_of_2(top_k + as_many),
        TOGETHER=shape.together,
        TILE=shape.tile,
        VECTOR=_VECTOR,
        BIASED=bias is not None,
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["routed", "count"])
def _gated(
    x,
    weights,
    shared,
    experts,
    bias,
    out,
    x_stride,
    routed,
    count,
    features,
    columns,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * TOGETHER
    pair = tl.program_id(1).to(tl.int64)
    # Rows alternate: gate, up, gate, up.
    which = tl.arange(0, TOGETHER * 2)
    feature = first + which // 2
    live = feature < features
    lane = tl.arange(0, TILE)
    wait_then_trigger(PDL)
    token = pair // TOP_K
    expert = tl.load(experts + pair, mask=pair < routed, other=0)
    if (expert < 0) | (expert >= count):
        return
    row = expert * (2 * features) + feature + which % 2 * features
    added = load_bias(bias, row, live, BIASED)
    rows = weights + row * columns
    if SHARED > 0:
        number = pair - routed
        row = feature + (which % 2 * SHARED + number % SHARED) * features
        rows = tl.where(number < 0, rows, shared + row * columns)
        token = tl.where(number < 0, token, number // SHARED)
    source = rows[:, None] + lane[None, :]
    inputs = x + token * x_stride + lane
    tile = load_once(source, live, lane < columns)
    sums = tl.zeros((TOGETHER * 2, TILE // VECTOR), tl.float32)
    for start in range(0, columns, TILE):
        next_tile = load_once(source + (start + TILE), live, start + TILE + lane < columns)
        values = tl.load(inputs + start, mask=start + lane < columns, other=0.0)
        sums += multiply_tile(tile, values, VECTOR)
        tile = next_tile
    gate, up = tl.split(tl.reshape(tl.sum(sums, 1) + added, (TOGETHER, 2)))
    result = join(gate, up, out.dtype.element_ty, GELU, CLAMPED, ALPHA, LIMIT)
    feature = first + tl.arange(0, TOGETHER)
    tl.store(out + pair * features + feature, result, mask=feature < features)


@triton.jit(do_not_specialize=["count"])
def _summed(
    x,
    weights,
    shared,
    experts,
    shares,
    bias,
    out,
    count,
    features,
    columns,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    CHOICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile has the same rows and columns of all of a token's experts: each is read while the
    others are."""
    token = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    lane = tl.arange(0, TILE)
    pair, expert, share, is_expert = chosen(experts, shares, token, count, TOP_K, CHOICES)
    row = expert[:, None] * features + feature[None, :]
    rows = weights + row * columns
    added = load_bias(bias, row, is_expert[:, None] & (feature < features)[None, :], BIASED)
    if SHARED > 0:
        number = tl.arange(0, CHOICES) - TOP_K
        is_shared = (number >= 0) & (number < SHARED)
        part = feature.to(tl.int64)[None, :] * SHARED + number[:, None]
        rows = tl.where(is_shared[:, None], shared + part * columns, rows)
        behind = tl.num_programs(1).to(tl.int64) * TOP_K + token * SHARED
        pair = tl.where(is_shared, behind + number, pair)
        share = tl.where(is_shared, 1.0, share)
        is_expert = is_expert | is_shared
    live = is_expert[:, None] & (feature < features)[None, :]
    source = rows[:, :, None] + lane[None, None, :]
    tile = load_rows(source, live, lane < columns)
    trigger_then_wait(PDL)
    inputs = x + pair[:, None] * columns + lane[None, :]
    sums = tl.zeros((CHOICES, TOGETHER, TILE // VECTOR), tl.float32)
    for start in range(0, columns, TILE):
        next_tile = load_rows(source + (start + TILE), live, start + TILE + lane < columns)
        # What no expert found was never written, and may be anything.
        is_value = is_expert[:, None] & (start + lane < columns)[None, :]
        values = tl.load(inputs + start, mask=is_value, other=0.0).to(tl.float32)
        products = tile.to(tl.float32) * values[:, None, :]
        sums += tl.sum(tl.reshape(products, (CHOICES, TOGETHER, TILE // VECTOR, VECTOR)), 3)
        tile = next_tile
    found = tl.sum(sums, 2) + added
    total = tl.sum(found * share[:, None], 0)
    to = out + token * features + feature
    tl.store(to, total.to(out.dtype.element_ty), mask=feature < features)


@triton.jit
def chosen(experts, shares, token, count, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """A token's pairs, their experts and what these count: nothing, where there is none."""
    choice = tl.arange(0, CHOICES)
    pair = token * TOP_K + choice
    expert = tl.load(experts + pair, mask=choice < TOP_K, other=-1)
    is_expert = (expert >= 0) & (expert < count)
    share = tl.load(shares + pair, mask=is_expert, other=0.0).to(tl.float32)
    return pair, tl.where(is_expert, expert, 0), share, is_expert


@triton.jit
def load_rows(source, rows_live, columns_live):
    """Weights are read once: they leave the cache first."""
    mask = rows_live[:, :, None] & columns_live[None, None, :]
    return tl.load(source, mask=mask, other=0, eviction_policy="evict_first")
