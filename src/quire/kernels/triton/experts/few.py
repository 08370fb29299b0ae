"""The products of experts for few tokens: as fast as the weights of the chosen ones are read.

As in `gemv.py`, a program multiplies a few rows of a matrix. In the first product these are of one
expert, and one token's. In the second they are the same rows of all experts of a token, so that
their results are weighted and added in registers. Which experts these are was known before the
first product began: the second asks for its first weights before it is done (`pdl.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.experts import Routing
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.gemv import load_once, multiply_tile
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger

_VECTOR = 8  # weights that a thread reads at once, 16 bytes


class FewShape(NamedTuple):
    """Of a program: the results that it computes, the columns of a tile, its warps."""

    together: int
    tile: int
    warps: int


def few_gated(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    activation: Gating,
    bias: Tensor | None,
    shape: FewShape,
) -> Tensor:
    """`[pairs, features]`, token by token; where there is no expert, it is left as it was."""
    count, height, columns = weights.shape
    features, (tokens, top_k) = height // 2, routing.experts.shape
    out = torch.empty((tokens * top_k, features), dtype=x.dtype, device=x.device)
    _gated[(triton.cdiv(features, shape.together), tokens * top_k)](
        x,
        weights,
        routing.experts,
        out if bias is None else bias,
        out,
        x.stride(0),
        count,
        features,
        columns,
        TOP_K=top_k,
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
    x: Tensor, weights: Tensor, routing: Routing, bias: Tensor | None, shape: FewShape
) -> Tensor:
    """The weighted sum of each token's second products: `[tokens, outputs]`."""
    count, features, columns = weights.shape
    tokens, top_k = routing.experts.shape
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    _summed[(triton.cdiv(features, shape.together), tokens)](
        x,
        weights,
        routing.experts,
        routing.weights,
        out if bias is None else bias,
        out,
        count,
        features,
        columns,
        TOP_K=top_k,
        TILES=triton.cdiv(columns, shape.tile),
        TOGETHER=shape.together,
        TILE=shape.tile,
        VECTOR=_VECTOR,
        BIASED=bias is not None,
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _gated(
    x,
    weights,
    experts,
    bias,
    out,
    x_stride,
    count,
    features,
    columns,
    TOP_K: tl.constexpr,
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
    row = feature + (which % 2) * features
    lane = tl.arange(0, TILE)
    wait_then_trigger(PDL)
    expert = tl.load(experts + pair)
    if (expert < 0) | (expert >= count):
        return
    matrix = weights + expert * (2 * features * columns)
    source = matrix + row.to(tl.int64)[:, None] * columns + lane[None, :]
    inputs = x + pair // TOP_K * x_stride + lane
    tile = load_once(source, live, lane < columns)
    sums = tl.zeros((TOGETHER * 2, TILE // VECTOR), tl.float32)
    for start in range(0, columns, TILE):
        next_tile = load_once(source + (start + TILE), live, start + TILE + lane < columns)
        values = tl.load(inputs + start, mask=start + lane < columns, other=0.0)
        sums += multiply_tile(tile, values, VECTOR)
        tile = next_tile
    result = tl.sum(sums, 1)
    if BIASED:
        result += tl.load(bias + expert * (2 * features) + row, mask=live, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(result, (TOGETHER, 2)))
    result = join(gate, up, out.dtype.element_ty, GELU, CLAMPED, ALPHA, LIMIT)
    feature = first + tl.arange(0, TOGETHER)
    tl.store(out + pair * features + feature, result, mask=feature < features)


@triton.jit(do_not_specialize=["count"])
def _summed(
    x,
    weights,
    experts,
    shares,
    bias,
    out,
    count,
    features,
    columns,
    TOP_K: tl.constexpr,
    TILES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    lane = tl.arange(0, TILE)
    matrix = weights + feature.to(tl.int64)[:, None] * columns + lane[None, :]
    live = feature < features
    first = token * TOP_K
    tile = _tile_of(matrix, tl.load(experts + first), 0, count, live, lane, features, columns)
    trigger_then_wait(PDL)
    sums = tl.zeros((TOGETHER, TILE // VECTOR), tl.float32)
    for i in range(TOP_K * TILES):
        pair = first + i // TILES
        start = i % TILES * TILE
        following = tl.minimum(i + 1, TOP_K * TILES - 1)
        expert = tl.load(experts + first + following // TILES)
        # After the last there is none: beyond all columns.
        at = tl.where(i < following, following % TILES * TILE, columns)
        next_tile = _tile_of(matrix, expert, at, count, live, lane, features, columns)
        # What no expert found was never written, and may be anything.
        end = columns_of(tl.load(experts + pair), count, columns)
        values = tl.load(x + pair * columns + start + lane, mask=start + lane < end, other=0.0)
        share = tl.where(end > 0, tl.load(shares + pair).to(tl.float32), 0.0)
        sums += share * multiply_tile(tile, values, VECTOR)
        tile = next_tile
    total = tl.sum(sums, 1)
    if BIASED:
        for choice in tl.static_range(TOP_K):
            total += weighted_bias(
                bias, experts, shares, first + choice, count, feature, live, features
            )
    tl.store(out + token * features + feature, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _tile_of(matrix, expert, start, count, live, lane, features, columns):
    """Some columns of some rows of an expert's matrix; of no expert, zeros."""
    end = columns_of(expert, count, columns)
    matrix += expert.to(tl.int64) * features * columns + start
    return load_once(matrix, live, start + lane < end)


@triton.jit
def columns_of(expert, count, columns):
    """No expert has none."""
    return tl.where((expert >= 0) & (expert < count), columns, 0)


@triton.jit
def weighted_bias(bias, experts, shares, pair, count, feature, live, features):
    """What the bias of a pair's expert adds to the sum; that of no expert is nothing."""
    expert = tl.load(experts + pair)
    is_expert = (expert >= 0) & (expert < count)
    source = bias + tl.where(is_expert, expert, 0) * features + feature
    added = tl.load(source, mask=live, other=0.0).to(tl.float32)
    return tl.where(is_expert, tl.load(shares + pair).to(tl.float32), 0.0) * added
