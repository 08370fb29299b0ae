"""`few_fours.py` on Hopper GPUs: tensor cores multiply codes that lie in registers as they came.

A tile is eight rows of a matrix and two steps of 32 elements (`kernels/four_bits.py`), which are
128 bytes of each row, and 64 columns of each quarter. Rows of a left factor are the eight rows in
the first step and in the second. A right factor has a column for each step and quarter, with x's
numbers there and zeros elsewhere, so that products of different scales end up in different sums:

                    columns of the right factor
    left factor     step 0: quarter 0, 1, 2, 3    step 1: quarter 0, 1, 2, 3
    rows, step 0    their sums                    nothing that is meant
    rows, step 1    nothing that is meant         their sums

A thread then scales four sums of a tile, whose codes are 64 in each thread. Codes are bfloat16
numbers divided by 2 ** 126 once their bits are masked; what x is multiplied by instead of one makes
half of that good, so that no product is too small for float32.

A thread reads the 16 bytes whose codes it multiplies: nothing goes through shared memory but the
sums of warps at the end. Several tiles are asked for before the first is there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.experts import Routing
from quire.kernels.four_bits import GROUP, FourBitExperts
from quire.kernels.triton.experts.few import chosen
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.grouped_fours import is_fast
from quire.kernels.triton.experts.unpack import e2m1_parts
from quire.kernels.triton.gemv import load_bias
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger

_ROWS = tl.constexpr(8)  # of a tile, as many as tensor cores have columns
_GROUP = tl.constexpr(GROUP)
_IN_INPUTS, _IN_SUMS = tl.constexpr(2.0**64), tl.constexpr(2.0**62)
_MASKED = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")


class Shape(NamedTuple):
    """How a program goes through its rows."""

    warps: int
    together: int  # tiles of a row (of each expert's) in a step
    ahead: int  # steps


# The fastest of those that were measured on an H200 with gpt-oss-20b's matrices: more warps on a
# processor are worth more than more bytes on their way to each.
GATED_SHAPE, SUMMED_SHAPE = Shape(4, 4, 1), Shape(8, 2, 2)


def fits(x: Tensor, gate_up: FourBitExperts, down: FourBitExperts) -> bool:
    """Whether a Hopper GPU multiplies bfloat16, and tiles divide the rows of both matrices."""
    features, hidden = gate_up.codes.shape[1] // 2, down.codes.shape[1]
    return is_fast(x) and features % _ROWS.value == hidden % _ROWS.value == 0


def few_gated(
    x: Tensor,
    weights: FourBitExperts,
    routing: Routing,
    activation: Gating,
    bias: Tensor | None,
    shape: Shape = GATED_SHAPE,
    fast: bool = True,
) -> Tensor:
    """`[pairs, features]`, token by token; where there is no expert, it is left as it was.

    `fast`: by instructions that Hopper GPUs have, for bfloat16.
    """
    count, height, quarter = weights.codes.shape
    features, (tokens, top_k) = height // 2, routing.experts.shape
    out = torch.empty((tokens * top_k, features), dtype=x.dtype, device=x.device)
    _gated[(features // _ROWS.value, tokens * top_k)](
        x.view(torch.int32),
        weights.codes.view(torch.int32),
        weights.words,
        routing.experts,
        out if bias is None else bias,
        out,
        x.stride(0) // 2,
        count,
        features,
        COLUMNS=x.shape[1],
        QUARTER=quarter,
        TOP_K=top_k,
        TOGETHER=shape.together,
        AHEAD=shape.ahead,
        BIASED=bias is not None,
        **gating_of(activation),
        FAST=fast,
        num_warps=shape.warps,
        num_stages=1,
        **pdl_launch(x.device),
    )
    return out


def few_summed(
    x: Tensor,
    weights: FourBitExperts,
    routing: Routing,
    bias: Tensor | None,
    shape: Shape = SUMMED_SHAPE,
    fast: bool = True,
) -> Tensor:
    """The weighted sum of each token's second products: `[tokens, outputs]`."""
    count, features, quarter = weights.codes.shape
    tokens, top_k = routing.experts.shape
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    _summed[(features // _ROWS.value, tokens)](
        x.view(torch.int32),
        weights.codes.view(torch.int32),
        weights.words,
        routing.experts,
        routing.weights,
        out if bias is None else bias,
        out,
        count,
        features,
        COLUMNS=x.shape[1],
        QUARTER=quarter,
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        TOGETHER=shape.together,
        AHEAD=shape.ahead,
        BIASED=bias is not None,
        FAST=fast,
        num_warps=shape.warps,
        num_stages=1,
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
    COLUMNS: tl.constexpr,
    QUARTER: tl.constexpr,
    TOP_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    steps: tl.constexpr = (QUARTER + 2 * _GROUP * TOGETHER - 1) // (2 * _GROUP * TOGETHER)
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * _ROWS
    wait_then_trigger(PDL)
    expert = tl.load(experts + pair)
    if (expert < 0) | (expert >= count):
        return
    height = 2 * features
    part = tl.arange(0, TOGETHER)
    matrix = codes + expert * height * (QUARTER // 2) + part * 0
    scales = exponents + expert * height * (QUARTER // _GROUP) + part * 0
    inputs = x + pair // TOP_K * x_stride + part * 0
    row = first + tl.arange(0, _ROWS)
    gate_bias = load_bias(bias + expert * height, row, row >= 0, BIASED)
    up_bias = load_bias(bias + expert * height + features, row, row >= 0, BIASED)
    ring = ()  # of what was asked for, step by step
    for step in tl.static_range(AHEAD):
        tile = step * TOGETHER + part
        found = _load(matrix, scales, inputs, tile, first, features, height, COLUMNS, QUARTER)
        ring = _appended(ring, found)

    sums = tl.zeros((TOGETHER, 2, 8, 2, 2, 2), tl.float32)
    up_sums = sums
    for start in range(AHEAD, steps + AHEAD, AHEAD):
        coming = ()
        for place in tl.static_range(AHEAD):
            gate, up = _multiply_both(ring[place], FAST, dtype)
            sums += gate
            up_sums += up
            tile = (start + place) * TOGETHER + part
            found = _load(matrix, scales, inputs, tile, first, features, height, COLUMNS, QUARTER)
            coming = _appended(coming, found)
        ring = coming

    both = _total(tl.join(sums, up_sums), 2, FAST)
    gate, up = tl.split(both)
    joined = join(gate + gate_bias, up + up_bias, dtype, GELU, CLAMPED, ALPHA, LIMIT)
    tl.store(out + pair * features + row, joined)


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
    COLUMNS: tl.constexpr,
    QUARTER: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of a step are those of all of a token's experts."""
    dtype: tl.constexpr = out.dtype.element_ty
    steps: tl.constexpr = (QUARTER + 2 * _GROUP * TOGETHER - 1) // (2 * _GROUP * TOGETHER)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * _ROWS
    which = tl.arange(0, CHOICES * TOGETHER)
    part, choice = which % TOGETHER, which // TOGETHER
    pair = token * TOP_K + choice
    expert = tl.load(experts + pair, mask=choice < TOP_K, other=-1)
    is_expert = (expert >= 0) & (expert < count)
    expert = tl.where(is_expert, expert, 0)
    matrix = codes + expert * features * (QUARTER // 2)
    scales = exponents + expert * features * (QUARTER // _GROUP)
    ring = ()
    for step in tl.static_range(AHEAD):
        tile = step * TOGETHER + part
        ring = _appended(ring, _load_codes(matrix, scales, tile, first, features, QUARTER))
    share = tl.load(shares + pair, mask=is_expert, other=0.0).to(tl.float32)
    row = first + tl.arange(0, _ROWS)
    added = _weighted_bias(
        bias, experts, shares, token, row, count, features, TOP_K, CHOICES, BIASED
    )
    trigger_then_wait(PDL)

    # What no expert found was never written, and may be anything.
    inputs = x + tl.where(is_expert, pair, token * TOP_K) * (COLUMNS // 2)
    right_ring = ()
    for step in tl.static_range(AHEAD):
        tile = step * TOGETHER + part
        numbers = _load_inputs(inputs, tile, is_expert, COLUMNS, QUARTER)
        right_ring = _appended(right_ring, numbers)
    sums = tl.zeros((CHOICES * TOGETHER, 2, 8, 2, 2, 2), tl.float32)
    for start in range(AHEAD, steps + AHEAD, AHEAD):
        coming = ()
        right_coming = ()
        for place in tl.static_range(AHEAD):
            right = _right_factors(right_ring[place], FAST, dtype)
            sums += _multiply(ring[place], right, FAST, dtype)
            tile = (start + place) * TOGETHER + part
            found = _load_codes(matrix, scales, tile, first, features, QUARTER)
            coming = _appended(coming, found)
            numbers = _load_inputs(inputs, tile, is_expert, COLUMNS, QUARTER)
            right_coming = _appended(right_coming, numbers)
        ring, right_ring = coming, right_coming

    total = _total(sums * share[:, None, None, None, None, None], 1, FAST)
    total += added
    tl.store(out + token * features + row, total.to(dtype))


@triton.jit
def _weighted_bias(
    bias,
    experts,
    shares,
    token,
    row,
    count,
    features,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BIASED: tl.constexpr,
):
    """What a token's experts add to its sums, which is not to be waited for once they are there."""
    total = tl.zeros(row.shape, tl.float32)
    if BIASED:
        _, expert, share, is_expert = chosen(experts, shares, token, count, TOP_K, CHOICES)
        source = bias + expert[:, None] * features + row[None, :]
        added = tl.load(source, mask=is_expert[:, None], other=0.0).to(tl.float32)
        total = tl.sum(added * share[:, None], 0)
    return total


@triton.jit
def _appended(ring, found):
    return ring + (found,)  # noqa: RUF005 (Triton has no other way)


@triton.jit
def _load(
    matrix,
    scales,
    inputs,
    tile,
    first,
    features,
    height,
    COLUMNS: tl.constexpr,
    QUARTER: tl.constexpr,
):
    """A step's tiles of gate and up, and the input of both."""
    gate = _load_codes(matrix, scales, tile, first, height, QUARTER)
    up_matrix, up_scales = matrix + features * (QUARTER // 2), scales + features
    up = _load_codes(up_matrix, up_scales, tile, first, height, QUARTER)
    numbers = _load_inputs(inputs, tile, tile >= 0, COLUMNS, QUARTER)
    return gate, up, numbers


@triton.jit
def _load_codes(matrix, scales, tile, first, height, QUARTER: tl.constexpr):
    """Codes `[32, tiles, 2, 4]`, by threads `4 g + t`: row `g`, pairs from `4 t` on; and words
    `[32, tiles]`, for sums of which `t` is the step and the upper half of quarters.

    Threads are the first dimension, then tiles, because Triton deals them out in this order.
    """
    groups: tl.constexpr = QUARTER // _GROUP
    thread = tl.arange(0, 32)
    row = first + thread // 4
    group = 2 * tile
    source = matrix + group * (_GROUP // 2)
    source = source[None, :] + (row * (QUARTER // 2) + thread % 4 * 4)[:, None]
    element = tl.arange(0, 2)[:, None] * (_GROUP // 2) + tl.arange(0, 4)[None, :]
    source = source[:, :, None, None] + element[None, None, :, :]
    word = group[None, :] + (thread // 2 % 2)[:, None]
    word_source = scales[None, :] + (word * height + row[:, None])
    live = group[:, None] + tl.arange(0, 2)[None, :] < groups
    # Codes beyond may be anything, as x is 0 there.
    found = tl.load(source, mask=live[None, :, :, None], eviction_policy="evict_first")
    words = tl.load(word_source, mask=word < groups, other=0, eviction_policy="evict_first")
    return found, words


@triton.jit
def _load_inputs(inputs, tile, live, COLUMNS: tl.constexpr, QUARTER: tl.constexpr):
    """`[32, tiles, 4]`, by threads `4 n + t`: the pairs from `4 t` on of column `n`."""
    thread = tl.arange(0, 32)
    quarter, half = thread // 4 % 4, thread // 16
    group = 2 * tile[None, :] + half[:, None]
    place = (group * (_GROUP // 2) + (thread % 4 * 4)[:, None])[:, :, None] + tl.arange(0, 4)
    column = (quarter * (QUARTER // 2))[:, None, None] + place
    is_number = (place < QUARTER // 2) & (column < COLUMNS // 2) & live[None, :, None]
    return tl.load(inputs[None, :, None] + column, mask=is_number, other=0)


@triton.jit
def _halves(words):
    """A last dimension of two, each of 16 bits. Words are what loops carry: halves would be packed
    anew in each turn. Behind this join Triton gives a thread four neighbours of a factor's inner
    dimension, which is why pairs `2 i` and `2 i + 1` of a thread are side by side there."""
    return tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))


@triton.jit
def _right_factors(pairs, FAST: tl.constexpr, dtype: tl.constexpr):
    """For each quarter, `[tiles, 32, 8]`: x's numbers in the columns of that quarter."""
    numbers = _halves(pairs).to(dtype, bitcast=True)
    return (
        _right_factor(numbers, 0, FAST),
        _right_factor(numbers, 1, FAST),
        _right_factor(numbers, 2, FAST),
        _right_factor(numbers, 3, FAST),
    )


@triton.jit
def _right_factor(numbers, WHICH: tl.constexpr, FAST: tl.constexpr):
    tiles: tl.constexpr = numbers.shape[1]
    is_its = (tl.arange(0, 32) // 4 % 4 == WHICH)[:, None, None, None]
    if FAST:
        factor = tl.where(is_its, _IN_INPUTS, 0.0).to(tl.bfloat16)
        numbers = tl.inline_asm_elementwise(
            _MASKED, "=r,r,r", [numbers, factor], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        numbers = tl.where(is_its, numbers, 0.0)
    numbers = tl.reshape(numbers, (8, 4, tiles, 2, 2, 2))
    #  n, t, tile, k16, pair of pairs, half
    return tl.reshape(tl.permute(numbers, (2, 3, 1, 4, 5, 0)), (tiles, 32, 8))


@triton.jit
def _multiply_both(found, FAST: tl.constexpr, dtype: tl.constexpr):
    """The sums of gate and up."""
    gate, up, numbers = found
    right = _right_factors(numbers, FAST, dtype)
    return _multiply(gate, right, FAST, dtype), _multiply(up, right, FAST, dtype)


@triton.jit
def _multiply(found, right, FAST: tl.constexpr, dtype: tl.constexpr):
    """Each tile's sums, `[tiles, step of rows, g, step, upper quarters, odd quarter]`."""
    codes, words = found
    tiles: tl.constexpr = words.shape[1]
    sums = tl.zeros((tiles, 16, 8), tl.float32)
    for quarter in tl.static_range(4):
        sums = tl.dot(_left_factor(codes, quarter, FAST, dtype), right[quarter], sums)
    words = words >> (tl.arange(0, 32) % 2 * 16)[:, None]  # the quarters of a thread's sums
    scales = tl.join(words << 23, words << 15) & 0x7F800000
    scales = tl.reshape(scales.to(tl.float32, bitcast=True), (8, 2, 2, tiles, 2))
    scales = tl.permute(scales, (3, 0, 1, 2, 4))[:, None, :, :, :, :]
    return tl.reshape(sums, (tiles, 2, 8, 2, 2, 2)) * scales


@triton.jit
def _left_factor(codes, QUARTER: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    tiles: tl.constexpr = codes.shape[1]
    numbers = tl.reshape(
        e2m1_parts(_halves(codes), QUARTER, FAST, dtype), (8, 4, tiles, 2, 2, 2, 2)
    )
    #  g, t, tile, step, k16, pair of pairs, half
    return tl.reshape(tl.permute(numbers, (2, 3, 0, 4, 1, 5, 6)), (tiles, 16, 32))


@triton.jit
def _total(sums, HALVES: tl.constexpr, FAST: tl.constexpr):
    """The sums of rows over all tiles, steps and quarters, `[8]` or `[8, HALVES]`."""
    tiles: tl.constexpr = sums.shape[0]
    sums = tl.reshape(sums, (tiles, 2, 8, 2, 4, HALVES))
    step = tl.arange(0, 2)
    is_meant = step[:, None] == step[None, :]
    sums = tl.where(is_meant[None, :, None, :, None, None], sums, 0.0)
    sums = tl.reshape(tl.permute(sums, (2, 5, 0, 1, 3, 4)), (8, HALVES, tiles * 16))
    total = tl.sum(sums, 2)
    if FAST:
        total *= _IN_SUMS
    if HALVES == 1:
        total = tl.reshape(total, (8,))
    return total
