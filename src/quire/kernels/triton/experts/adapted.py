"""Experts for tokens of which some have adapters: each pair of a token and an expert has its own.

What an adapter adds to the first product comes before the gate, so that products and gates are
launches of their own here. Pairs are rows of a batch like any others (`kernels/adapter_slots.py`):

    tokens ─ by expert ─ product ─ + b (a x) ─ gate ─ by expert ─ product ─ + b (a x) ─ sum
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.adapter_slots import NO_ADAPTER, AdapterBatch, tile_rows
from quire.kernels.codes import CodeFormat
from quire.kernels.experts import CodedExperts, ExpertMatrices, ExpertMLPs, Routing
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.act_and_mul import act_and_mul
from quire.kernels.triton.adapters.expand import expand
from quire.kernels.triton.adapters.shrink import shrink
from quire.kernels.triton.codes.quantise import quantise
from quire.kernels.triton.experts import grouped, grouped_fours
from quire.kernels.triton.experts.combine import sum_of_chosen
from quire.kernels.triton.experts.gather import by_expert
from quire.kernels.triton.experts.mlps import (
    GROUP,
    HALVES,
    has_kernel,
    is_aligned,
    sorted_pairs,
    tiles_of,
)
from quire.kernels.triton.experts.order import Blocks, sort_by_expert
from quire.kernels.triton.experts.tiles import Tile

# From pairs in the order of experts to `[pairs, outputs]`, token by token.
Product = Callable[[Tensor, ExpertMatrices, Blocks, Tile], Tensor]


def adapted_experts(x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor | None:
    """What a backend's `experts` returns; None: there is no kernel for these."""
    adapters, chosen = mlps.adapters, _kind(x, mlps)
    assert adapters is not None
    if chosen is None or len(x) == 0:
        return None
    kind, itemsize, product = chosen
    hidden_size, features = x.shape[1], adapters.down.a.shape[2]
    tiles = tiles_of(kind, hidden_size, features, itemsize, routing, mlps)
    blocks, top_k = sorted_pairs(routing, mlps, tiles), routing.experts.shape[1]
    pairs = pair_batch(routing.experts, mlps.count, adapters.batch.slots, len(adapters.down.a))

    x = x.contiguous()
    both = product(by_expert(x, blocks, top_k), mlps.gate_up, blocks, tiles.down)
    expand(shrink(x, adapters.gate_up, pairs, top_k), adapters.gate_up, pairs, both)
    if isinstance(mlps.activation, ClampedSwiGLU):
        hidden = mlps.activation(*both.chunk(2, dim=-1))
    else:
        hidden = act_and_mul(both, mlps.activation)
    found = product(by_expert(hidden, blocks, 1), mlps.down, blocks, tiles.down)
    expand(shrink(hidden, adapters.down, pairs), adapters.down, pairs, found)
    return sum_of_chosen(found, routing, mlps.count)


def pair_batch(experts: Tensor, count: int, slots: Tensor, numbers: int) -> AdapterBatch:
    """Pairs, numbered token by token, by slot and expert; `slots` are those of the tokens, and
    there are `numbers` of both together."""
    slots = slots[:, None]
    is_adapted = (slots >= 0) & (experts >= 0) & (experts < count)
    of_pairs = torch.where(is_adapted, slots * count + experts, NO_ADAPTER).int()
    pairs = of_pairs.numel()
    if pairs <= numbers:  # few are alike: each is a tile, and nothing is sorted
        order = torch.arange(pairs, dtype=torch.int32, device=experts.device)
        tiles = torch.stack((of_pairs.flatten(), order, order + 1))
        return AdapterBatch(of_pairs.flatten(), order, tiles, tile_rows(1, 1))
    blocks = sort_by_expert(of_pairs, numbers, tile_rows(pairs, numbers))
    return AdapterBatch(of_pairs.flatten(), blocks.order, blocks.table, blocks.size)


def _kind(x: Tensor, mlps: ExpertMLPs) -> tuple[str, int, Product] | None:
    """What their tiles are measured for, the bytes of a number, and what multiplies them."""
    numbers = mlps.gate_up.dense, mlps.down.dense
    if numbers[0] is not None and numbers[1] is not None:
        if x.dtype != numbers[0].dtype or not (is_aligned(numbers[0]) and is_aligned(numbers[1])):
            return None
        return "numbers", x.itemsize, _by_numbers
    if x.dtype not in HALVES:
        return None
    gate_up, down = mlps.gate_up.packed, mlps.down.packed
    if isinstance(gate_up, CodedExperts) and isinstance(down, CodedExperts):
        return ("codes", 1, _by_codes) if has_kernel(gate_up) and has_kernel(down) else None
    if isinstance(gate_up, FourBitExperts) and isinstance(down, FourBitExperts):
        return "four bits", 2, _by_four_bits
    return None


def _by_numbers(x: Tensor, matrices: ExpertMatrices, blocks: Blocks, tile: Tile) -> Tensor:
    assert matrices.dense is not None
    return grouped.product(x, matrices.dense, blocks, matrices.bias, tile)


def _by_codes(x: Tensor, matrices: ExpertMatrices, blocks: Blocks, tile: Tile) -> Tensor:
    assert isinstance(matrices.packed, CodedExperts)
    form = CodeFormat(None if matrices.packed.scales.is_by_rows else GROUP)
    return grouped.product(quantise(x, form), matrices.packed, blocks, matrices.bias, tile)


def _by_four_bits(x: Tensor, matrices: ExpertMatrices, blocks: Blocks, tile: Tile) -> Tensor:
    assert isinstance(matrices.packed, FourBitExperts)
    return grouped_fours.product(x, matrices.packed, blocks, matrices.bias, tile)
