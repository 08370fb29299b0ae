"""What both forms of the second small product share: their arguments, and `b (a x)` of a tile."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.sizes import next_power_of_2

ALIGNMENT = 16  # where outputs begin at multiples of it, numbers are read by vectors
MOST_RANKS = 64  # multiplied at once
# Arguments that are columns of one table: they begin elsewhere in each layer, aligned or not.
TABLES = ("starts", "is_biased")


def launch_arguments(
    hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch, product: Tensor, out: Tensor
) -> tuple[object, ...]:
    """`hidden` is `[parts, rows, ranks]`, as `shrink` makes it, or `[1, rows, slots * ranks]`: what
    all slots make of every row."""
    assert hidden.stride(2) == product.stride(1) == out.stride(1) == 1
    ranks = slots.a.shape[1]
    return (
        hidden,
        slots.b,
        slots.bias,
        slots.starts,
        slots.is_biased,
        slots.columns,
        batch.order,
        batch.tiles,
        product,
        out,
        hidden.stride(0),
        hidden.stride(1),
        ranks if hidden.shape[2] > ranks else 0,  # from one slot to the next
        product.stride(0),
        out.stride(0),
        slots.starts.stride(0),
        slots.is_biased.stride(0),
        slots.experts,
        batch.tiles.shape[1],
        slots.most_rank,
        slots.b.shape[2],
    )


def launch_constants(hidden: Tensor, slots: AdapterSlots, batch: AdapterBatch) -> dict[str, object]:
    return {
        "PARTS": hidden.shape[0],
        "ROWS": batch.tile_rows,
        "RANKS": ranks_together(slots),
        "FEATURES": block_features(batch),
        "num_warps": 4,
        "num_stages": 1,  # the loop has one pass for most adapters
        **pdl_launch(hidden.device),
    }


def block_features(batch: AdapterBatch) -> int:
    """The features of a block. Many tiles of few rows keep a GPU busy with large ones."""
    return 256 if batch.tile_rows == 16 and batch.tiles.shape[1] > 32 else 64


def ranks_together(slots: AdapterSlots) -> int:
    """How many a kernel multiplies at once: the same of all adapters, so that there is only one."""
    return min(MOST_RANKS, max(16, next_power_of_2(slots.most_rank)))


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
