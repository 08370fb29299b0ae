"""The second small product of adapters before a gate: `activation(gate) * up` of the sums.

As `expand.py`, with the same features of both outputs in one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.adapters.ranks import (
    TABLES,
    add_ranks,
    added_bias,
    block_features,
    by_feature,
    by_row,
    launch_arguments,
    launch_constants,
    load_ranks,
)
from quire.kernels.triton.pdl import trigger_then_wait
from quire.kernels.triton.sizes import cdiv


def expand_gated(
    hidden: Tensor,
    slots: AdapterSlots,
    batch: AdapterBatch,
    product: Tensor,
    activation: Activation,
) -> Tensor:
    """`activation(gate) * up` of the matrix's `product` `[rows, 2 * features]` and what adapters
    add to its two outputs."""
    features = slots.sizes[0]
    assert slots.sizes == (features, features)
    out = torch.empty((len(product), features), dtype=product.dtype, device=product.device)
    if len(out):
        blocks = cdiv(features, block_features(batch))
        _expand_gated[(batch.tiles.shape[1] * blocks,)](
            *launch_arguments(hidden, slots, batch, product, out),
            blocks,
            features,
            GELU=activation is Activation.GELU_TANH,
            **launch_constants(hidden, slots, batch),
        )
    return out


@triton.jit(do_not_specialize=["tiles", "part_stride"], do_not_specialize_on_alignment=TABLES)
def _expand_gated(
    hidden,
    b,
    bias,
    starts,
    is_biased,
    columns,
    order,
    table,
    product,
    out,
    part_stride,
    hidden_stride,
    slot_stride,
    product_stride,
    out_stride,
    starts_stride,
    biased_stride,
    experts,
    tiles,
    most_rank,
    features,
    blocks,
    half,
    GELU: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same of both outputs, `half` of all features each."""
    dtype: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0) // blocks
    feature = tl.program_id(0) % blocks * FEATURES + tl.arange(0, FEATURES)
    is_own = feature < half
    slot = tl.load(table + tile)
    adapted = slot >= 0
    of_slot = starts + slot // experts * starts_stride
    up_start = tl.load(of_slot + 1, mask=adapted, other=0)
    up_rank = tl.load(of_slot + 2, mask=adapted, other=0) - up_start
    biased = tl.load(is_biased + slot // experts * biased_stride, mask=adapted, other=0)  # 0 or 1
    first_row, end = tl.load(table + tiles + tile), tl.load(table + 2 * tiles + tile)
    place = first_row + tl.arange(0, ROWS)
    live = place < end
    row = tl.load(order + place, mask=live, other=0).to(tl.int64)
    slot = slot.to(tl.int64)
    of_gate = b + slot * most_rank * features + feature
    of_up = of_gate + half
    bias += slot * features + feature
    gate = added_bias(bias, feature < half * biased, ROWS)
    up = added_bias(bias + half, feature < half * biased, ROWS)
    gate_weights = load_ranks(of_gate, 0, up_start, is_own, features, ROWS, RANKS)
    up_weights = load_ranks(of_up, 0, up_rank, is_own, features, ROWS, RANKS)
    trigger_then_wait(PDL)
    if first_row < end:
        mask = by_row(live, ROWS) & by_feature(is_own, ROWS)
        at = product + by_row(row * product_stride, ROWS) + by_feature(feature, ROWS)
        gate_before = tl.load(at, mask=mask, other=0.0)
        up_before = tl.load(at + half, mask=mask, other=0.0)
        of_row = hidden + row * hidden_stride + slot * slot_stride
        gate = add_ranks(
            gate,
            of_row,
            part_stride,
            of_gate,
            gate_weights,
            up_start,
            live,
            is_own,
            features,
            PARTS,
            ROWS,
            RANKS,
        )
        up = add_ranks(
            up,
            of_row + up_start,
            part_stride,
            of_up,
            up_weights,
            up_rank,
            live,
            is_own,
            features,
            PARTS,
            ROWS,
            RANKS,
        )
        gate = (gate + gate_before.to(tl.float32)).to(dtype).to(tl.float32)
        up = (up + up_before.to(tl.float32)).to(dtype).to(tl.float32)
        # Rounded before it is multiplied, as models were trained.
        result = (activate(gate, GELU).to(dtype).to(tl.float32) * up).to(dtype)
        to = out + by_row(row * out_stride, ROWS) + by_feature(feature, ROWS)
        tl.store(to, result, mask=mask)
