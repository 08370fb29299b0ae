"""What both forms of the second small product share: their arguments, and `b (a x)` of a tile.

A tile has rows by features. A product of tensor cores has sixteen of the first and eight of the
second, so a tile of few rows is turned: otherwise most of what a program holds and computes would
be of rows that are not there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import FEW_ROWS, AdapterBatch, AdapterSlots
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.sizes import next_power_of_2

ALIGNMENT = 16  # where outputs begin at multiples of it, numbers are read by vectors
MOST_RANKS = 64  # multiplied at once
_LEAST_ROWS = tl.constexpr(16)  # of a tile that is not turned
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
    features, warps = _program(batch)
    return {
        "PARTS": hidden.shape[0],
        "ROWS": batch.tile_rows,
        "RANKS": ranks_together(slots),
        "FEATURES": features,
        "num_warps": warps,
        "num_stages": 1,  # the loop has one pass for most adapters
        **pdl_launch(hidden.device),
    }


def block_features(batch: AdapterBatch) -> int:
    return _program(batch)[0]


def _program(batch: AdapterBatch) -> tuple[int, int]:
    """The features of a block, and the warps of a program. Tiles of few rows are many, and keep a
    GPU busy with large blocks."""
    return (128, 2) if batch.tile_rows == FEW_ROWS else (64, 4)


def ranks_together(slots: AdapterSlots) -> int:
    """How many a kernel multiplies at once: the same of all adapters, so that there is only one."""
    return min(MOST_RANKS, max(16, next_power_of_2(slots.most_rank)))


@triton.jit
def by_row(numbers, ROWS: tl.constexpr):
    """One number for each row of a tile, or for what takes the rows' place in a factor."""
    return numbers[None, :] if ROWS < _LEAST_ROWS else numbers[:, None]


@triton.jit
def by_feature(numbers, ROWS: tl.constexpr):
    """One number for each feature of a tile, or for what takes the features' place."""
    return numbers[:, None] if ROWS < _LEAST_ROWS else numbers[None, :]


@triton.jit
def added_bias(bias, live, ROWS: tl.constexpr):
    """What the sums of every row begin with."""
    added = tl.load(bias, mask=live, other=0.0).to(tl.float32)
    return by_feature(added, ROWS) + by_row(tl.zeros((ROWS,), tl.float32), ROWS)


@triton.jit
def load_ranks(own, first, rank, is_own, features, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Some rows of `b`; zeros where there are none."""
    at = first + tl.arange(0, RANKS)
    mask = by_row(at < rank, ROWS) & by_feature(is_own, ROWS)
    from_first = by_row(at.to(tl.int64) * features, ROWS)
    return tl.load(by_feature(own, ROWS) + from_first, mask=mask, other=0.0)


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
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add the product of `a x`, whose parts are summed up, and `b`; its first rows are here."""
    for first in range(0, rank, RANKS):
        at = first + tl.arange(0, RANKS)
        mask = by_row(live, ROWS) & by_feature(at < rank, ROWS)
        sums = tl.zeros(mask.shape, tl.float32)
        for part in tl.static_range(PARTS):
            of_part = by_row(source, ROWS) + part * part_stride + by_feature(at, ROWS)
            sums += tl.load(of_part, mask=mask, other=0.0)
        sums = sums.to(weights.dtype)
        if ROWS < _LEAST_ROWS:
            found = tl.dot(weights, sums, found, input_precision="ieee")
        else:
            found = tl.dot(sums, weights, found, input_precision="ieee")
        weights = load_ranks(own, first + RANKS, rank, is_own, features, ROWS, RANKS)
    return found
