"""What a token's experts found, weighted and added up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.experts import Routing
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

_WIDTH = 1024  # of a row that a program sums


def sum_of_chosen(results: Tensor, routing: Routing, count: int) -> Tensor:
    """Each token's `results` `[pairs, hidden]`, weighted; those of no expert are not read."""
    tokens, top_k = routing.experts.shape
    hidden = results.shape[1]
    out = torch.empty((tokens, hidden), dtype=results.dtype, device=results.device)
    _sum[(tokens, cdiv(hidden, _WIDTH))](
        results,
        routing.experts,
        routing.weights,
        out,
        count,
        hidden,
        TOP_K=top_k,
        WIDTH=_WIDTH,
        **pdl_launch(results.device),
    )
    return out


@triton.jit
def _sum(
    results,
    experts,
    weights,
    out,
    count,
    hidden,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    trigger_then_wait(PDL)
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(experts + pair)
        weight = tl.load(weights + pair).to(tl.float32)
        live = lane < tl.where((expert >= 0) & (expert < count), hidden, 0)
        found = tl.load(results + pair * hidden + lane, mask=live, other=0.0).to(tl.float32)
        total += tl.where(live, weight * found, 0.0)
    tl.store(out + token * hidden + lane, total.to(out.dtype.element_ty), mask=lane < hidden)
