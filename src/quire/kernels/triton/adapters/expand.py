"""The second small product of adapters, added to that of the matrix: `out += b (a x) + bias`.

A program has a tile of rows that use the same slot, and some features of one output. Features are
cut into blocks output by output: those of an output that begins at feature `f` are numbered from

    f // size + its index

which leaves each output room enough. What the adapter holds is read before the matrix's product is
done (`pdl.py`). Before a gate, `activation(gate) * up` is written instead of the sums: then a tile
of rows without adapters is computed, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait

_FEATURES = 64  # of a block
_MOST_RANKS = 64  # multiplied at once


def expand(hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor) -> None:
    """Add to `out` `[rows, features]` what adapters make of `hidden`, which `shrink` found."""
    assert out.stride(1) == 1
    outputs = len(slots.sizes)
    if len(out):
        blocks = slots.b.shape[2] // _FEATURES + outputs
        _expand[(batch.tiles.shape[1], blocks)](
            *_arguments(hidden, slots, batch, out),
            OUTPUTS=outputs,
            **_constants(hidden, slots, batch),
        )


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
    assert slots.sizes == (features, features) and product.stride(1) == 1
    out = torch.empty((len(product), features), dtype=product.dtype, device=product.device)
    if len(out):
        _expand_gated[(batch.tiles.shape[1], triton.cdiv(features, _FEATURES))](
            *_arguments(hidden, slots, batch, product),
            out,
            features,
            GELU=activation is Activation.GELU_TANH,
            **_constants(hidden, slots, batch),
        )
    return out


def _arguments(
    hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor
) -> tuple[object, ...]:
    return (
        hidden,
        slots.b,
        slots.bias,
        slots.starts,
        slots.is_biased,
        slots.columns,
        batch.order,
        batch.tiles,
        out,
        out.stride(0),
        slots.starts.stride(0),
        slots.is_biased.stride(0),
        slots.experts,
        batch.tiles.shape[1],
        hidden.shape[1],
        hidden.shape[2],
        slots.most_rank,
        slots.b.shape[2],
    )


def _constants(hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch) -> dict[str, object]:
    return {
        "PARTS": hidden.shape[0],
        "ROWS": batch.tile_rows,
        "RANKS": min(_MOST_RANKS, max(16, triton.next_power_of_2(slots.most_rank))),
        "FEATURES": _FEATURES,
        "num_warps": 8 if batch.tile_rows > 32 else 4,
        "num_stages": 1,  # the loop has one pass for most adapters
        **pdl_launch(hidden.device),
    }


@triton.jit(do_not_specialize=["tiles", "rows"])
def _expand(
    hidden,
    b,
    bias,
    starts,
    is_biased,
    columns,
    order,
    table,
    out,
    out_stride,
    starts_stride,
    biased_stride,
    experts,
    tiles,
    rows,
    ranks,
    most_rank,
    features,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(table + tile)
    output = tl.zeros((), tl.int32)
    for i in tl.static_range(1, OUTPUTS):
        output += (block >= tl.load(columns + i) // FEATURES + i).to(tl.int32)
    begin = tl.load(columns + output)
    number = block - begin // FEATURES - output
    feature = begin + number * FEATURES + tl.arange(0, FEATURES)
    last = tl.load(columns + output + 1)
    is_own = feature < last
    adapted = slot >= 0
    start = tl.load(starts + slot // experts * starts_stride + output, mask=adapted, other=0)
    rank = (
        tl.load(starts + slot // experts * starts_stride + output + 1, mask=adapted, other=0)
        - start
    )
    biased = tl.load(is_biased + slot // experts * biased_stride, mask=adapted, other=0)  # 0 or 1
    first_row = tl.load(table + tiles + tile)
    place = first_row + tl.arange(0, ROWS)
    live = place < tl.load(table + 2 * tiles + tile)
    row = tl.load(order + place, mask=live, other=0).to(tl.int64)
    slot = slot.to(tl.int64)
    own = b + slot * most_rank * features + feature
    found = added_bias(bias + slot * features + feature, feature < last * biased, ROWS, FEATURES)
    weights = load_ranks(own, 0, rank, is_own, features, RANKS)
    trigger_then_wait(PDL)
    if rank + biased > 0:
        source = hidden + row * ranks + start
        found = add_ranks(
            found, source, rows * ranks, own, weights, rank, live, is_own, features, PARTS, RANKS
        )
        to = out + row[:, None] * out_stride + feature[None, :]
        mask = live[:, None] & is_own[None, :]
        found += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles", "rows"])
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
    product_stride,
    starts_stride,
    biased_stride,
    experts,
    tiles,
    rows,
    ranks,
    most_rank,
    features,
    out,
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
    tile = tl.program_id(0)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_own = feature < half
    slot = tl.load(table + tile)
    adapted = slot >= 0
    of_slot = starts + slot // experts * starts_stride
    up_start = tl.load(of_slot + 1, mask=adapted, other=0)
    up_rank = tl.load(of_slot + 2, mask=adapted, other=0) - up_start
    biased = tl.load(is_biased + slot // experts * biased_stride, mask=adapted, other=0)  # 0 or 1
    place = tl.load(table + tiles + tile) + tl.arange(0, ROWS)
    live = place < tl.load(table + 2 * tiles + tile)
    row = tl.load(order + place, mask=live, other=0).to(tl.int64)
    slot = slot.to(tl.int64)
    of_gate = b + slot * most_rank * features + feature
    of_up = of_gate + half
    bias += slot * features + feature
    gate = added_bias(bias, feature < half * biased, ROWS, FEATURES)
    up = added_bias(bias + half, feature < half * biased, ROWS, FEATURES)
    gate_weights = load_ranks(of_gate, 0, up_start, is_own, features, RANKS)
    up_weights = load_ranks(of_up, 0, up_rank, is_own, features, RANKS)
    trigger_then_wait(PDL)
    source, stride = hidden + row * ranks, rows * ranks
    gate = add_ranks(
        gate, source, stride, of_gate, gate_weights, up_start, live, is_own, features, PARTS, RANKS
    )
    up = add_ranks(
        up,
        source + up_start,
        stride,
        of_up,
        up_weights,
        up_rank,
        live,
        is_own,
        features,
        PARTS,
        RANKS,
    )
    mask = live[:, None] & is_own[None, :]
    at = product + row[:, None] * product_stride + feature[None, :]
    gate = (gate + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    up = (up + tl.load(at + half, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    # Rounded before it is multiplied, as models were trained.
    result = (activate(gate, GELU).to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(out + row[:, None] * half + feature[None, :], result, mask=mask)


@triton.jit
def added_bias(bias, live, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """What the sums of every row begin with."""
    added = tl.load(bias, mask=live, other=0.0).to(tl.float32)
    return tl.zeros((ROWS, FEATURES), tl.float32) + added[None, :]


@triton.jit
def load_ranks(own, first, rank, is_own, features, RANKS: tl.constexpr):
    """Some rows of `b`; zeros where there are none."""
    at = first + tl.arange(0, RANKS)
    mask = (at < rank)[:, None] & is_own[None, :]
    return tl.load(own[None, :] + at[:, None].to(tl.int64) * features, mask=mask, other=0.0)


@triton.jit
def add_ranks(
    found,
    source,
    part_stride,
    own,
    weights,
    rank,
    live,
    is_own,
    features,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add the product of `a x`, whose parts are summed up, and `b`; its first rows are here."""
    for first in range(0, rank, RANKS):
        at = first + tl.arange(0, RANKS)
        mask = live[:, None] & (at < rank)[None, :]
        sums = tl.zeros((live.shape[0], RANKS), tl.float32)
        for part in tl.static_range(PARTS):
            sums += tl.load(
                source[:, None] + part * part_stride + at[None, :], mask=mask, other=0.0
            )
        found = tl.dot(sums.to(weights.dtype), weights, found, input_precision="ieee")
        weights = load_ranks(own, first + RANKS, rank, is_own, features, RANKS)
    return found
