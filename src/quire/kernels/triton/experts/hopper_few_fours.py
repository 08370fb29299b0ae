"""`few_fours.py` on Hopper GPUs: tensor cores multiply codes that lie in registers as they came.

A program has eight rows of a matrix, whose tiles its warps share (`hopper_few_tiles.py`).

A thread reads the 16 bytes whose codes it multiplies: nothing goes through shared memory but the
sums of warps at the end. Several tiles are asked for before the first is there.

Which experts a token goes to, a launch before has written, or each program finds it from the
router's products (`choose.py`), which saves that launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.experts import RouterProducts, Routing
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.experts.choose import appended, chosen_expert, chosen_experts
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.grouped_fours import is_fast
from quire.kernels.triton.experts.hopper_few_tiles import (
    GROUP,
    ROWS,
    STEP,
    load_codes,
    load_inputs,
    multiply,
    right_factors,
    total_of,
)
from quire.kernels.triton.gemv import load_bias
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger
from quire.kernels.triton.sizes import next_power_of_2
from quire.kernels.triton.small_dots import has_small_dots


class Shape(NamedTuple):
    """How a program goes through its rows."""

    warps: int
    together: int  # tiles of a row (of each expert's) in a step
    ahead: int  # steps


# The fastest of those that were measured on an H200 with gpt-oss-20b's matrices: more warps on a
# processor are worth more than more bytes on their way to each.
GATED_SHAPE, SUMMED_SHAPE = Shape(4, 4, 1), Shape(8, 2, 2)

Choice = Routing | RouterProducts


def fits(x: Tensor, gate_up: FourBitExperts, down: FourBitExperts) -> bool:
    """Whether a Hopper GPU multiplies MXFP4 by bfloat16, and tiles divide the rows of both
    matrices."""
    features, hidden = gate_up.codes.shape[1] // 2, down.codes.shape[1]
    is_even = features % ROWS.value == hidden % ROWS.value == 0
    is_mxfp4 = gate_up.scale_dtype is None and down.scale_dtype is None
    return is_mxfp4 and is_even and is_fast(x) and has_small_dots(x.device)


def few_gated(
    x: Tensor,
    weights: FourBitExperts,
    choice: Choice,
    activation: Gating,
    bias: Tensor | None,
    shape: Shape = GATED_SHAPE,
    fast: bool = True,
) -> Tensor:
    """`[pairs, features]`, token by token; where there is no expert, it is left as it was.

    `fast`: by instructions that Hopper GPUs have, for bfloat16.
    """
    count, height, quarter = weights.codes.shape
    features, tokens = height // 2, len(x)
    experts, shares, sizes = _choice_arguments(choice)
    top_k = sizes["TOP_K"]
    out = torch.empty((tokens * top_k, features), dtype=x.dtype, device=x.device)
    _gated[(features // ROWS.value, tokens * top_k)](
        x.view(torch.int32),
        weights.codes.view(torch.int32),
        weights.words,
        experts,
        shares,
        out if bias is None else bias,
        out,
        x.stride(0) // 2,
        count,
        features,
        COLUMNS=x.shape[1],
        QUARTER=quarter,
        **sizes,
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
    choice: Choice,
    bias: Tensor | None,
    shape: Shape = SUMMED_SHAPE,
    fast: bool = True,
) -> Tensor:
    """The weighted sum of each token's second products: `[tokens, outputs]`."""
    count, features, quarter = weights.codes.shape
    experts, shares, sizes = _choice_arguments(choice)
    top_k = sizes["TOP_K"]
    tokens = len(x) // top_k
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    _summed[(features // ROWS.value, tokens)](
        x.view(torch.int32),
        weights.codes.view(torch.int32),
        weights.words,
        experts,
        shares,
        out if bias is None else bias,
        out,
        count,
        features,
        COLUMNS=x.shape[1],
        QUARTER=quarter,
        **sizes,
        CHOICES=next_power_of_2(top_k),
        TOGETHER=shape.together,
        AHEAD=shape.ahead,
        BIASED=bias is not None,
        FAST=fast,
        num_warps=shape.warps,
        num_stages=1,
        **pdl_launch(x.device),
    )
    return out


def _choice_arguments(choice: Choice) -> tuple[Tensor, Tensor, dict[str, int]]:
    """What a kernel takes for `experts` and `shares`: what was chosen, or, with `EXPERTS`, what it
    chooses from and which tokens are padding."""
    if isinstance(choice, Routing):
        return choice.experts, choice.weights, {"TOP_K": choice.experts.shape[1], "EXPERTS": 0}
    sizes = {"TOP_K": choice.top_k, "EXPERTS": choice.numbers.shape[1]}
    return choice.numbers, choice.is_padding.view(torch.int8), sizes


@triton.jit(do_not_specialize=["count"])
def _gated(
    x,
    codes,
    exponents,
    experts,
    shares,
    bias,
    out,
    x_stride,
    count,
    features,
    COLUMNS: tl.constexpr,
    QUARTER: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
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
    steps: tl.constexpr = (QUARTER + STEP * TOGETHER - 1) // (STEP * TOGETHER)
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    wait_then_trigger(PDL)
    if EXPERTS > 0:
        expert = chosen_expert(experts, shares, pair // TOP_K, pair % TOP_K, TOP_K, EXPERTS)
    else:
        expert = tl.load(experts + pair)
    if (expert < 0) | (expert >= count):
        return
    height = 2 * features
    part = tl.arange(0, TOGETHER)
    matrix = codes + expert * height * (QUARTER // 2) + part * 0
    scales = exponents + expert * height * (QUARTER // GROUP) + part * 0
    inputs = x + pair // TOP_K * x_stride + part * 0
    row = first + tl.arange(0, ROWS)
    gate_bias = load_bias(bias + expert * height, row, row >= 0, BIASED)
    up_bias = load_bias(bias + expert * height + features, row, row >= 0, BIASED)
    ring = ()  # of what was asked for, step by step
    for step in tl.static_range(AHEAD):
        tile = step * TOGETHER + part
        found = _load(matrix, scales, inputs, tile, first, features, height, COLUMNS, QUARTER)
        ring = appended(ring, found)

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
            coming = appended(coming, found)
        ring = coming

    both = total_of(tl.join(sums, up_sums), 2, FAST)
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
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of a step are those of all of a token's experts."""
    dtype: tl.constexpr = out.dtype.element_ty
    steps: tl.constexpr = (QUARTER + STEP * TOGETHER - 1) // (STEP * TOGETHER)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    which = tl.arange(0, CHOICES * TOGETHER)
    part, choice = which % TOGETHER, which // TOGETHER
    pair = token * TOP_K + choice
    expert, share, is_expert = _chosen(experts, shares, token, choice, count, TOP_K, EXPERTS)
    matrix = codes + expert * features * (QUARTER // 2)
    scales = exponents + expert * features * (QUARTER // GROUP)
    ring = ()
    for step in tl.static_range(AHEAD):
        tile = step * TOGETHER + part
        ring = appended(ring, load_codes(matrix, scales, tile, first, features, QUARTER))
    row = first + tl.arange(0, ROWS)
    added = _weighted_bias(
        bias, experts, shares, token, row, count, features, TOP_K, EXPERTS, CHOICES, BIASED
    )
    trigger_then_wait(PDL)

    # What no expert found was never written, and may be anything.
    inputs = x + tl.where(is_expert, pair, token * TOP_K) * (COLUMNS // 2)
    right_ring = ()
    for step in tl.static_range(AHEAD):
        tile = step * TOGETHER + part
        numbers = load_inputs(inputs, tile, is_expert, COLUMNS, QUARTER)
        right_ring = appended(right_ring, numbers)
    sums = tl.zeros((CHOICES * TOGETHER, 2, 8, 2, 2, 2), tl.float32)
    for start in range(AHEAD, steps + AHEAD, AHEAD):
        coming = ()
        right_coming = ()
        for place in tl.static_range(AHEAD):
            right = right_factors(right_ring[place], FAST, dtype)
            sums += multiply(ring[place], right, FAST, dtype)
            tile = (start + place) * TOGETHER + part
            found = load_codes(matrix, scales, tile, first, features, QUARTER)
            coming = appended(coming, found)
            numbers = load_inputs(inputs, tile, is_expert, COLUMNS, QUARTER)
            right_coming = appended(right_coming, numbers)
        ring, right_ring = coming, right_coming

    total = total_of(sums * share[:, None, None, None, None, None], 1, FAST)
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
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    BIASED: tl.constexpr,
):
    """What a token's experts add to its sums, which is not to be waited for once they are there."""
    total = tl.zeros(row.shape, tl.float32)
    if BIASED:
        place = tl.arange(0, CHOICES)
        expert, share, is_expert = _chosen(experts, shares, token, place, count, TOP_K, EXPERTS)
        source = bias + expert[:, None] * features + row[None, :]
        added = tl.load(source, mask=is_expert[:, None], other=0.0).to(tl.float32)
        total = tl.sum(added * share[:, None], 0)
    return total


@triton.jit
def _chosen(experts, shares, token, place, count, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """The experts in these places of a token's choice, what they count, and where there are any."""
    if EXPERTS > 0:
        expert, share = chosen_experts(experts, shares, token, place, TOP_K, EXPERTS)
        is_expert = (expert >= 0) & (expert < count)
    else:
        pair = token * TOP_K + place
        expert = tl.load(experts + pair, mask=place < TOP_K, other=-1)
        is_expert = (expert >= 0) & (expert < count)
        share = tl.load(shares + pair, mask=is_expert, other=0.0).to(tl.float32)
    return tl.where(is_expert, expert, 0), share, is_expert


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
    gate = load_codes(matrix, scales, tile, first, height, QUARTER)
    up_matrix, up_scales = matrix + features * (QUARTER // 2), scales + features
    up = load_codes(up_matrix, up_scales, tile, first, height, QUARTER)
    numbers = load_inputs(inputs, tile, tile >= 0, COLUMNS, QUARTER)
    return gate, up, numbers


@triton.jit
def _multiply_both(found, FAST: tl.constexpr, dtype: tl.constexpr):
    """The sums of gate and up."""
    gate, up, numbers = found
    right = right_factors(numbers, FAST, dtype)
    return multiply(gate, right, FAST, dtype), multiply(up, right, FAST, dtype)
