"""The choice of experts in one launch: a program scores and chooses for one token.

What it computes is `RoutingRule` (`layers/router.py`), without groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.experts import NOWHERE, Routing
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger

_TINY = tl.constexpr(1e-20)  # what keeps a sum of scores that are all 0 from being divided by


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
            CHOICES=triton.next_power_of_2(top_k),
            EXPERTS=triton.next_power_of_2(count),
            SOFTMAX=softmax,
            SIGMOID=sigmoid,
            CORRECTED=correction is not None,
            RENORMALISED=renormalised,
            NOWHERE=NOWHERE,
            num_warps=1,
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
    NOWHERE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    live = lane < count
    wait_then_trigger(PDL)
    scores = tl.load(products + token * stride + lane, mask=live, other=-float("inf"))
    scores = scores.to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores /= tl.sum(scores, 0)
    elif SIGMOID:
        scores = tl.sigmoid(scores)
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction + lane, mask=live, other=0.0).to(tl.float32)
    ranked = tl.where(live, ranked, -float("inf"))

    choice = tl.arange(0, CHOICES)
    chosen = tl.full((CHOICES,), NOWHERE, tl.int64)
    found = tl.full((CHOICES,), -float("inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(ranked, 0)
        score = tl.sum(tl.where(lane == best, scores, 0.0), 0)
        chosen = tl.where(choice == i, best, chosen)
        found = tl.where(choice == i, score, found)
        ranked = tl.where(lane == best, -float("inf"), ranked)

    is_choice = choice < TOP_K
    if not (SOFTMAX or SIGMOID):
        found = tl.exp(found - tl.max(found, 0))
        found /= tl.sum(found, 0)
    found = tl.where(is_choice, found, 0.0)
    if RENORMALISED:
        found /= tl.sum(found, 0) + _TINY
    padded = tl.load(is_padding + token) != 0
    to = token * TOP_K + choice
    tl.store(experts + to, tl.where(padded, NOWHERE, chosen), mask=is_choice)
    tl.store(weights + to, (found * scale).to(weights.dtype.element_ty), mask=is_choice)
