"""The first small product of adapters: `a x`, for all outputs of a matrix and all slots at once.

A program has a tile of rows that use the same slot, and a part of the columns: with few rows there
would be too few programs otherwise. The sums of the parts are added by whoever reads them
(`expand.py`), always in the same order, so that nothing is zeroed or added by atomics.

    hidden [parts, rows, ranks of all outputs]   float32; what no adapter has is left as it was
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.triton.adapters.ranks import TABLES
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_COLUMNS = 128  # multiplied at once
_MOST_RANKS = 64  # the same
# By the rows of a tile: steps of all sizes then have few kernels, compiled before the first one.
_MOST_PARTS = {4: 8, 16: 8, 32: 8, 64: 2}


def shrink(x: Tensor, slots: AdapterSlots, batch: AdapterBatch, top_k: int = 1) -> Tensor:
    """Rows of the batch are pairs of a row of `x` and one of `top_k` experts, numbered row by row;
    where there are no experts, they are the rows of `x`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, tiles = len(batch.order), batch.tiles.shape[1]
    ranks, columns = slots.a.shape[1:]
    parts = _parts(columns, batch.tile_rows)
    hidden = torch.empty((parts, rows, ranks), dtype=torch.float32, device=x.device)
    if rows == 0:
        return hidden
    wide = cdiv(cdiv(columns, _COLUMNS), parts) * _COLUMNS
    _shrink[(tiles, parts)](
        x,
        slots.a,
        slots.starts,
        batch.order,
        batch.tiles,
        hidden,
        x.stride(0),
        slots.starts.stride(0),
        slots.experts,
        tiles,
        rows,
        ranks,
        columns,
        wide,
        OUTPUTS=len(slots.sizes),
        TOP_K=top_k,
        ROWS=batch.tile_rows,
        RANKS=min(_MOST_RANKS, max(16, next_power_of_2(ranks))),
        COLUMNS=_COLUMNS,
        num_warps=4,
        num_stages=4 if x.itemsize == 2 else 3,  # as many as shared memory holds
        **pdl_launch(x.device),
    )
    return hidden


def _parts(columns: int, rows: int) -> int:
    """A power of two, and no part without columns."""
    most = min(_MOST_PARTS[rows], cdiv(columns, _COLUMNS))
    return 1 << (most.bit_length() - 1)


@triton.jit(do_not_specialize=["tiles", "rows"], do_not_specialize_on_alignment=TABLES)
def _shrink(
    x,
    a,
    starts,
    order,
    table,
    hidden,
    x_stride,
    starts_stride,
    experts,
    tiles,
    rows,
    ranks,
    columns,
    wide,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    wait_then_trigger(PDL)  # kernels sort pairs into tiles; `expand` then reads those early
    slot = tl.load(table + tile)
    if slot < 0:
        return
    begin, end = tl.load(table + tiles + tile), tl.load(table + 2 * tiles + tile)
    used = tl.load(starts + slot // experts * starts_stride + OUTPUTS)
    place = begin + tl.arange(0, ROWS)
    live = place < end
    row = tl.load(order + place, mask=live, other=0).to(tl.int64)
    source = x + (row // TOP_K)[:, None] * x_stride
    own = a + slot.to(tl.int64) * ranks * columns
    to = hidden + (part.to(tl.int64) * rows + row)[:, None] * ranks
    first = part * wide
    lane = tl.arange(0, COLUMNS)
    for start in range(0, used, RANKS):
        rank = start + tl.arange(0, RANKS)
        sums = tl.zeros((ROWS, RANKS), tl.float32)
        for column in range(first, min(first + wide, columns), COLUMNS):
            at = column + lane
            numbers = tl.load(
                source + at[None, :], mask=live[:, None] & (at < columns)[None, :], other=0.0
            )
            weights = tl.load(
                own + rank[None, :].to(tl.int64) * columns + at[:, None],
                mask=(rank < used)[None, :] & (at < columns)[:, None],
                other=0.0,
            )
            sums = tl.dot(numbers, weights, sums, input_precision="ieee")
        tl.store(to + rank[None, :], sums, mask=live[:, None] & (rank < used)[None, :])
