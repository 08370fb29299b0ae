"""Experts on a GPU: tokens sorted by expert on the device, one launch for all experts of a product.

    order    which (token, choice) pairs are the first expert's, the second's, …
    blocks   each expert's pairs in blocks of `BLOCK`; a program multiplies one block with a few
             columns, so experts that no token chose are not read

How many blocks there are only the device knows. The grid is as large as they can be at most, and a
program beyond them does nothing: nothing waits, and a graph holds it all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.experts import Routing
from quire.kernels.triton.act_and_mul import activate

_COLUMNS = 64  # of the output that a program computes; with a gate, of each half
_INNER = 64
_WIDTH = 1024  # of a row that a program sums
_BLOCKS = (16, 32, 64, 128)
_FEW_PAIRS, _FEW_EXPERTS = 64, 512  # that one program sorts in its registers


class Blocks(NamedTuple):
    """Which pairs each program of a product has."""

    order: Tensor  # int64 [pairs]: the pairs, numbered token by token, sorted by expert
    experts: Tensor  # int64 [most blocks]: of each block; the number of experts: it is not there
    first_block: Tensor  # int64 [experts + 1]: of each expert
    bounds: Tensor  # int64 [experts + 1]: where each expert's pairs begin in `order`
    size: int


def sort_by_expert(experts: Tensor, count: int) -> Blocks:
    """`experts` `[tokens, top_k]`; numbers that are no expert's are in no block."""
    pairs = experts.numel()
    size = next((each for each in _BLOCKS if pairs <= each * count), _BLOCKS[-1])
    if 0 < pairs <= _FEW_PAIRS and count < _FEW_EXPERTS:
        return _sort_few(experts, count, size)
    ordered, order = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(count + 1, device=experts.device))
    first_block = torch.zeros_like(bounds)
    torch.cumsum((bounds.diff() + size - 1) // size, 0, out=first_block[1:])
    most = pairs // size + min(pairs, count)
    numbers = torch.arange(most, device=experts.device)
    of_blocks = torch.searchsorted(first_block[1:], numbers, right=True)
    return Blocks(order, of_blocks, first_block, bounds, size)


def _sort_few(experts: Tensor, count: int, size: int) -> Blocks:
    """The same, where one program sees all: one launch, not a dozen."""
    pairs = experts.numel()
    most = pairs // size + min(pairs, count)
    order, of_blocks = experts.new_empty(pairs), experts.new_empty(most)
    first_block, bounds = experts.new_empty(count + 1), experts.new_empty(count + 1)
    _sort[(1,)](
        experts.contiguous(),
        order,
        of_blocks,
        first_block,
        bounds,
        pairs,
        count,
        most,
        size,
        PAIRS=triton.next_power_of_2(pairs),
        EXPERTS=triton.next_power_of_2(count + 1),
        BLOCKS=triton.next_power_of_2(most),
        num_warps=8,
    )
    return Blocks(order, of_blocks, first_block, bounds, size)


@triton.jit
def _sort(
    experts,
    order,
    of_blocks,
    first_block,
    bounds,
    pairs,
    count,
    most,
    size,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)
    number = tl.arange(0, EXPERTS)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
    is_expert = number < count
    is_chosen = ((chosen[:, None] == number[None, :]) & is_expert[None, :]).to(tl.int32)
    counts = tl.sum(is_chosen, 0)
    begins = tl.cumsum(counts, 0) - counts
    # Before a pair come those of lower experts, and earlier ones of its own.
    place = begins[None, :] + tl.cumsum(is_chosen, 0) - 1
    place = tl.sum(place * is_chosen, 1)
    tl.store(order + place, pair, mask=tl.sum(is_chosen, 1) > 0)
    tl.store(bounds + number, begins, mask=number <= count)
    blocks = (counts + size - 1) // size
    ends = tl.cumsum(blocks, 0)
    tl.store(first_block + number, ends - blocks, mask=number <= count)
    block = tl.arange(0, BLOCKS)
    is_before = ((ends[None, :] <= block[:, None]) & is_expert[None, :]).to(tl.int32)
    tl.store(of_blocks + block, tl.sum(is_before, 1), mask=block < most)


def gated_product(
    x: Tensor, weights: Tensor, blocks: Blocks, top_k: int, activation: Activation
) -> Tensor:
    """`[pairs, features]` in the order of experts, of weights `[experts, 2 * features, inputs]`."""
    features = weights.shape[1] // 2
    out = torch.empty((len(blocks.order), features), dtype=x.dtype, device=x.device)
    _launch(x, weights, out, blocks, top_k, features, activation)
    return out


def product(x: Tensor, weights: Tensor, blocks: Blocks) -> Tensor:
    """From pairs in the order of experts to `[pairs, outputs]`, token by token; what goes nowhere
    is left as it was."""
    out = torch.empty((len(x), weights.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, weights, out, blocks, 1, weights.shape[1], None)
    return out


def _launch(
    x: Tensor,
    weights: Tensor,
    out: Tensor,
    blocks: Blocks,
    top_k: int,
    features: int,
    activation: Activation | None,
) -> None:
    if not len(blocks.experts):
        return
    grid = (len(blocks.experts), triton.cdiv(features, _COLUMNS))
    _multiply[grid](
        x,
        weights,
        out,
        blocks.order,
        blocks.experts,
        blocks.first_block,
        blocks.bounds,
        weights.shape[0],
        top_k,
        features,
        x.shape[1],
        GATED=activation is not None,
        GELU=activation is Activation.GELU_TANH,
        BLOCK=blocks.size,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        num_warps=4 if blocks.size < 128 else 8,
        num_stages=3,
    )


@triton.jit
def _multiply(
    x,
    weights,
    out,
    order,
    experts,
    first_block,
    bounds,
    count,
    top_k,
    features,
    size,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert >= count:
        return
    lane = tl.arange(0, BLOCK)
    place = tl.load(bounds + expert) + (block - tl.load(first_block + expert)) * BLOCK + lane
    is_pair = place < tl.load(bounds + expert + 1)
    pair = tl.load(order + place, mask=is_pair, other=0)
    # A gate's input is a token's, and its results lie by expert; of the second product both turn.
    source = pair // top_k if GATED else place
    target = place if GATED else pair
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < features
    height = features * 2 if GATED else features
    matrix = weights + expert * height * size
    row = matrix + column[:, None].to(tl.int64) * size
    sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    more_sums = sums
    for start in range(0, size, INNER):
        inner = start + tl.arange(0, INNER)
        is_inner = inner < size
        numbers = tl.load(
            x + source[:, None] * size + inner[None, :],
            mask=is_pair[:, None] & is_inner[None, :],
            other=0.0,
        )
        is_weight = is_column[:, None] & is_inner[None, :]
        tile = tl.load(row + inner[None, :], mask=is_weight, other=0.0)
        sums = tl.dot(numbers, tl.trans(tile), sums, input_precision="ieee")
        if GATED:
            tile = tl.load(row + features * size + inner[None, :], mask=is_weight, other=0.0)
            more_sums = tl.dot(numbers, tl.trans(tile), more_sums, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    result = sums.to(dtype)
    if GATED:
        # Rounded before it is multiplied, as models were trained.
        activated = activate(result.to(tl.float32), GELU).to(dtype).to(tl.float32)
        result = (activated * more_sums.to(dtype).to(tl.float32)).to(dtype)
    mask = is_pair[:, None] & is_column[None, :]
    tl.store(out + target[:, None] * features + column[None, :], result, mask=mask)


def sum_of_chosen(results: Tensor, routing: Routing, count: int) -> Tensor:
    """Each token's `results` `[pairs, hidden]`, weighted; those of no expert are not read."""
    tokens, top_k = routing.experts.shape
    hidden = results.shape[1]
    out = torch.empty((tokens, hidden), dtype=results.dtype, device=results.device)
    if tokens:
        grid = (tokens, triton.cdiv(hidden, _WIDTH))
        _sum[grid](
            results, routing.experts, routing.weights, out, count, hidden, TOP_K=top_k, WIDTH=_WIDTH
        )
    return out


@triton.jit
def _sum(results, experts, weights, out, count, hidden, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(experts + pair)
        weight = tl.load(weights + pair).to(tl.float32)
        end = tl.where(expert >= 0, tl.where(expert < count, hidden, 0), 0)
        live = lane < end
        found = tl.load(results + pair * hidden + lane, mask=live, other=0.0).to(tl.float32)
        total += tl.where(live, weight * found, 0.0)
    tl.store(out + token * hidden + lane, total.to(out.dtype.element_ty), mask=lane < hidden)
