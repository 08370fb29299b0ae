"""Experts in kernels alone, so that a step of decodes can be recorded: the choice, the pairs of a
token and an expert in the order of experts, and the sum of what experts found."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.experts import ExpertMLPs, RouterScores, Routing
from quire.kernels.numba.kernels import combine_kernel, route_kernel, sort_kernel
from quire.kernels.numba.sizes import LANES

FEW = 64  # tokens, or pairs of an expert, for which these kernels are faster than torch


class SortedPairs(NamedTuple):
    rows: Tensor  # [pairs, hidden]: of each pair its token's, behind those of experts before
    places: Tensor  # int64 [tokens, top_k]: where each pair is among them
    runs: Tensor  # int64: as `FloatProduct` takes them


def can_route(x: Tensor, scores: RouterScores) -> bool:
    return (
        x.dtype == scores.weight.dtype == torch.float32
        and x.shape[1] % LANES == 0
        and len(x) <= FEW
        and x.is_contiguous()
    )


def can_compute(x: Tensor, routing: Routing, mlps: ExpertMLPs) -> bool:
    """Whether there are copies of the matrices that kernels read, and few tokens."""
    return (
        mlps.gate_up.interleaved is not None
        and mlps.down.interleaved is not None
        and mlps.gate_up.bias is None
        and mlps.down.bias is None
        and mlps.adapters is None
        and not isinstance(mlps.activation, ClampedSwiGLU)
        and x.dtype == routing.weights.dtype == torch.float32
        and x.shape[1] % LANES == 0
        and routing.experts.numel() <= FEW * mlps.count
        and x.is_contiguous()
        and routing.experts.is_contiguous()
        and routing.weights.is_contiguous()
    )


def route(x: Tensor, scores: RouterScores, slots: int, threads: int) -> Routing:
    """`slots` is the address of the tokens' slots."""
    tokens, experts = len(x), len(scores.weight)
    room = -(-experts // LANES) * LANES
    chosen = torch.empty((tokens, scores.top_k), dtype=torch.int64)
    weights = torch.empty((tokens, scores.top_k), dtype=torch.float32)
    ranked = torch.empty((tokens, 2 * room), dtype=torch.float32)
    route_kernel(
        torch.float32,
        threads,
        0,
        tokens,
        experts,
        scores.top_k,
        x.shape[1],
        x.data_ptr(),
        scores.weight.data_ptr(),
        0 if scores.bias is None else scores.bias.data_ptr(),
        scores.bias is not None,
        0 if scores.correction is None else scores.correction.data_ptr(),
        scores.correction is not None,
        scores.is_softmax,
        scores.is_sigmoid,
        scores.is_renormalised,
        scores.scale,
        slots,
        ranked.data_ptr(),
        room,
        chosen.data_ptr(),
        weights.data_ptr(),
    )
    return Routing(chosen, weights)


def sort(x: Tensor, routing: Routing, experts: int) -> SortedPairs:
    pairs = routing.experts.numel()
    rows = torch.empty((pairs, x.shape[1]), dtype=torch.float32)
    places = torch.empty(routing.experts.shape, dtype=torch.int64)
    runs = torch.empty(1 + 3 * experts, dtype=torch.int64)
    starts = torch.empty(experts, dtype=torch.int64)
    sort_kernel(
        torch.float32,
        1,
        0,
        pairs,
        routing.experts.shape[1],
        experts,
        routing.experts.data_ptr(),
        runs.data_ptr(),
        starts.data_ptr(),
        places.data_ptr(),
        x.shape[1],
        x.data_ptr(),
        rows.data_ptr(),
    )
    return SortedPairs(rows, places, runs)


def combine(found: Tensor, pairs: SortedPairs, weights: Tensor, threads: int) -> Tensor:
    """Each token's results, weighted and added up; one that goes nowhere is zero."""
    tokens, top_k = weights.shape
    out = torch.empty((tokens, found.shape[1]), dtype=torch.float32)
    combine_kernel(
        torch.float32,
        threads,
        0,
        tokens,
        top_k,
        found.shape[1],
        weights.data_ptr(),
        pairs.places.data_ptr(),
        found.data_ptr(),
        out.data_ptr(),
    )
    return out
