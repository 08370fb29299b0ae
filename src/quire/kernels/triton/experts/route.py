"""The choice of experts in one launch: a program scores and chooses for one token.

What it computes is `RoutingRule` (`layers/router.py`), without groups.

Finding the best expert, then the best of the others, and so on, takes few instructions, each of
which waits for the one before. With few tokens that wait is all that counts: then a program
compares every expert with every other, and those that fewer than k are ahead of are chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.experts import NOWHERE, Routing
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.sizes import next_power_of_2

_TINY = tl.constexpr(1e-20)  # what keeps a sum of scores that are all 0 from being divided by
_FEW = 512  # tokens, up to which a program's own time counts, and not how many instructions it has
_MOST_RANKED = 256  # experts: above, comparing all of them takes longer than taking turns


def route(
    products: Tensor,
    correction: Tensor | None,
    is_padding: Tensor,
    top_k: int,
    *,
    softmax: bool,
    sigmoid: bool,
    renormalised: bool,
    scale: float,
    dtype: torch.dtype,
) -> Routing:
    """Of `[tokens, experts]`; with neither softmax nor sigmoid, weights are the softmax of the
    chosen ones. Padding goes nowhere."""
    tokens, count = products.shape
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=products.device)
    weights = torch.empty((tokens, top_k), dtype=dtype, device=products.device)
    if tokens:
        ranked = tokens <= _FEW and count <= _MOST_RANKED
        padded = next_power_of_2(count)
        _route[(tokens,)](
            products,
            products if correction is None else correction,
            is_padding.view(torch.int8),
            experts,
            weights,
            products.stride(0),
            count,
            scale,
            TOP_K=top_k,
            CHOICES=next_power_of_2(top_k),
            EXPERTS=padded,
            SOFTMAX=softmax,
            SIGMOID=sigmoid,
            CORRECTED=correction is not None,
            RENORMALISED=renormalised,
            RANKED=ranked,
            NOWHERE=NOWHERE,
            num_warps=min(8, max(1, padded // 32)) if ranked else 1,
            **pdl_launch(products.device),
        )
    return Routing(experts, weights)


@triton.jit
def _route(
    products,
    correction,
    is_padding,
    experts,
    weights,
    stride,
    count,
    scale,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALISED: tl.constexpr,
    RANKED: tl.constexpr,
    NOWHERE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    live = lane < count
    if CORRECTED:
        added = tl.load(correction + lane, mask=live, other=0.0).to(tl.float32)
    wait_then_trigger(PDL)
    scores = tl.load(products + token * stride + lane, mask=live, other=-float("inf"))
    padded = tl.load(is_padding + token) != 0
    scores = scores.to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores /= tl.sum(scores, 0)
    elif SIGMOID:
        scores = tl.sigmoid(scores)
    ranked = scores
    if CORRECTED:
        ranked += added
    ranked = tl.where(live, ranked, -float("inf"))
    if RANKED:
        place, expert, found = _by_rank(ranked, lane, live), lane, scores
    else:
        place, expert, found = _in_turn(scores, ranked, lane, TOP_K, CHOICES)

    is_choice = place < TOP_K
    if not (SOFTMAX or SIGMOID):
        found = tl.exp(found - tl.max(tl.where(is_choice, found, -float("inf")), 0))
    found = tl.where(is_choice, found, 0.0)
    if not (SOFTMAX or SIGMOID):
        found /= tl.sum(found, 0)
    if RENORMALISED:
        found /= tl.sum(found, 0) + _TINY
    to = token * TOP_K + place
    tl.store(experts + to, tl.where(padded, NOWHERE, expert).to(tl.int64), mask=is_choice)
    tl.store(weights + to, (found * scale).to(weights.dtype.element_ty), mask=is_choice)


@triton.jit
def _by_rank(ranked, lane, live):
    """Of every expert its place: how many are ahead of it."""
    # Whole numbers in the same order, of which no two are the same: of equals the first is ahead.
    bits = ranked.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(live, bits, -(2**31))  # behind NaN, too
    keys = (bits.to(tl.int64) << 32) | (lane.shape[0] - lane)
    return tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)


@triton.jit
def _in_turn(scores, ranked, lane, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """Of every place its expert, and the score of that."""
    place = tl.arange(0, CHOICES)
    expert = tl.zeros((CHOICES,), tl.int32)
    found = tl.full((CHOICES,), -float("inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(ranked, 0)
        score = tl.sum(tl.where(lane == best, scores, 0.0), 0)
        expert = tl.where(place == i, best, expert)
        found = tl.where(place == i, score, found)
        ranked = tl.where(lane == best, -float("inf"), ranked)
    return place, expert, found
