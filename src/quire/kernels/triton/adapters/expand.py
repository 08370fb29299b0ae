"""The second small product of adapters, added to that of the matrix: `out += b (a x) + bias`.

A program has a tile of rows that use the same slot, and some features of one output. Features are
cut into blocks output by output: those of an output that begins at feature `f` are numbered from

    f // size + its index

which leaves each output room enough. What the adapter holds is read before the matrix's product is
done (`pdl.py`); then `a x` and the product are asked for together. The sums take the product's
place, or go elsewhere: then a tile of rows without adapters is written, too.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.triton.adapters.ranks import (
    ALIGNMENT,
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


def expand(hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor) -> None:
    """Add to `out` `[rows, features]` what adapters make of `hidden`, which `shrink` found."""
    _launch_expand(hidden, slots, batch, out, out)


def expanded(hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch, product: Tensor) -> Tensor:
    """`product` and what adapters add to it, in a tensor of its own."""
    out = torch.empty(product.shape, dtype=product.dtype, device=product.device)
    _launch_expand(hidden, slots, batch, product, out)
    return out


def _launch_expand(
    hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch, product: Tensor, out: Tensor
) -> None:
    outputs, features = len(slots.sizes), slots.b.shape[2]
    if len(out):
        blocks = features // block_features(batch) + outputs
        _expand[(batch.tiles.shape[1] * blocks,)](
            *launch_arguments(hidden, slots, batch, product, out),
            blocks,
            OUTPUTS=outputs,
            ALIGNMENT=math.gcd(ALIGNMENT, *slots.sizes),
            IN_PLACE=out is product,
            **launch_constants(hidden, slots, batch),
        )


@triton.jit(do_not_specialize=["tiles", "part_stride"], do_not_specialize_on_alignment=TABLES)
def _expand(
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
    OUTPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    slot = tl.load(table + tile)
    output = tl.zeros((), tl.int32)
    for i in tl.static_range(1, OUTPUTS):
        output += (block >= tl.load(columns + i) // FEATURES + i).to(tl.int32)
    begin = tl.multiple_of(tl.load(columns + output), ALIGNMENT)
    last = tl.multiple_of(tl.load(columns + output + 1), ALIGNMENT)
    number = block - begin // FEATURES - output
    feature = begin + number * FEATURES + tl.arange(0, FEATURES)
    is_own = feature < last
    adapted = slot >= 0
    of_slot = starts + slot // experts * starts_stride + output
    start = tl.load(of_slot, mask=adapted, other=0)
    rank = tl.load(of_slot + 1, mask=adapted, other=0) - start
    biased = tl.load(is_biased + slot // experts * biased_stride, mask=adapted, other=0)  # 0 or 1
    first_row, end = tl.load(table + tiles + tile), tl.load(table + 2 * tiles + tile)
    place = first_row + tl.arange(0, ROWS)
    live = place < end
    row = tl.load(order + place, mask=live, other=0).to(tl.int64)
    slot = slot.to(tl.int64)
    own = b + slot * most_rank * features + feature
    found = added_bias(bias + slot * features + feature, feature < last * biased, ROWS)
    weights = load_ranks(own, 0, rank, is_own, features, ROWS, RANKS)
    trigger_then_wait(PDL)
    changes = rank + biased > 0 if IN_PLACE else first_row < end
    if changes:
        mask = by_row(live, ROWS) & by_feature(is_own, ROWS)
        at = product + by_row(row * product_stride, ROWS) + by_feature(feature, ROWS)
        before = tl.load(at, mask=mask, other=0.0)
        source = hidden + row * hidden_stride + slot * slot_stride + start
        found = add_ranks(
            found,
            source,
            part_stride,
            own,
            weights,
            rank,
            live,
            is_own,
            features,
            PARTS,
            ROWS,
            RANKS,
        )
        found += before.to(tl.float32)
        to = out + by_row(row * out_stride, ROWS) + by_feature(feature, ROWS)
        tl.store(to, found.to(out.dtype.element_ty), mask=mask)
