"""Adapters of long prompts: runs of neighbouring rows that use one slot, or none.

With many rows, what counts is how often the product of the matrix is read and written. A run needs
no table that says which rows are whose, so its programs have large tiles and little else to do;
`a x` is a product of its own, which libraries multiply as fast as it is read. Adapters with a bias,
which are rare and would cost all others registers, go the way of short runs (`expand.py`).
"""

from __future__ import annotations

import math

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import AdapterSlots, SlotRun
from quire.kernels.triton.adapters.ranks import ALIGNMENT, ranks_together

_ROWS = 64  # of a program
_FEATURES = 128  # the same


def add_runs(
    x: Tensor,
    slots: AdapterSlots,
    runs: tuple[SlotRun, ...],
    product: Tensor,
    hidden: Tensor | None = None,
) -> None:
    """Add to `product` `[rows, features]` what the adapters of all runs make of `x`; `hidden` is
    `a x`, if it is known."""
    outputs, features = len(slots.sizes), product.shape[1]
    for run in runs:
        if run.slot < 0:
            continue
        own, out = run_hidden(x, slots, run, hidden), product[run.rows]
        _add_run[features // _FEATURES + outputs, triton.cdiv(len(out), _ROWS)](
            own,
            slots.b[run.slot],
            slots.columns,
            slots.starts,
            out,
            own.stride(0),
            out.stride(0),
            len(out),
            run.slot,
            slots.starts.stride(0),
            features,
            OUTPUTS=outputs,
            ALIGNMENT=math.gcd(ALIGNMENT, *slots.sizes),
            ROWS=_ROWS,
            RANKS=ranks_together(slots),
            PASSES=triton.cdiv(slots.most_rank, ranks_together(slots)),
            FEATURES=_FEATURES,
            num_warps=4,
        )


def run_hidden(x: Tensor, slots: AdapterSlots, run: SlotRun, known: Tensor | None = None) -> Tensor:
    """`a x` of a run: the ranks of one output after those of the other."""
    if known is not None:
        return known[run.rows]
    return F.linear(x[run.rows], slots.a[run.slot, : sum(slots.ranks[run.slot])])


@triton.jit(do_not_specialize=["hidden_stride", "rows", "slot"])
def _add_run(
    hidden,
    b,
    columns,
    starts,
    out,
    hidden_stride,
    out_stride,
    rows,
    slot,
    starts_stride,
    features,
    OUTPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PASSES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Features are cut into blocks output by output, as in `expand.py`."""
    block = tl.program_id(0)
    output = tl.zeros((), tl.int32)
    for i in tl.static_range(1, OUTPUTS):
        output += (block >= tl.load(columns + i) // FEATURES + i).to(tl.int32)
    begin = tl.multiple_of(tl.load(columns + output), ALIGNMENT)
    last = tl.multiple_of(tl.load(columns + output + 1), ALIGNMENT)
    starts += slot * starts_stride + output
    start = tl.load(starts)
    rank = tl.load(starts + 1) - start
    feature = begin + (block - begin // FEATURES - output) * FEATURES + tl.arange(0, FEATURES)
    row = rows_of(tl.program_id(1), ROWS)
    live, is_own = row < rows, feature < last
    if rank > 0:
        mask = live[:, None] & is_own[None, :]
        at = out + row[:, None] * out_stride + feature[None, :]
        before = tl.load(at, mask=mask, other=0.0)
        source = hidden + row * hidden_stride + start
        first = load_hidden(source, 0, rank, live, RANKS)
        found = multiply(first, source, b + feature, rank, live, is_own, features, RANKS, PASSES)
        found += before.to(tl.float32)
        tl.store(at, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rows_of(number, ROWS: tl.constexpr):
    """The last of the run first: what the matrix's product wrote last may still be in the cache."""
    return ((tl.num_programs(1) - 1 - number) * ROWS + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def load_hidden(source, first, rank, live, RANKS: tl.constexpr):
    """Some columns of a tile's `a x`; zeros where there are none."""
    at = first + tl.arange(0, RANKS)
    mask = live[:, None] & (at < rank)[None, :]
    return tl.load(source[:, None] + at[None, :], mask=mask, other=0.0)


@triton.jit
def multiply(
    hidden,
    source,
    own,
    rank,
    live,
    is_own,
    features,
    RANKS: tl.constexpr,
    PASSES: tl.constexpr,
):
    """The product of a tile's `a x`, whose first columns are here, and some columns of `b`."""
    found = tl.zeros((live.shape[0], is_own.shape[0]), tl.float32)
    for number in tl.static_range(PASSES):  # one for most adapters
        if number > 0:
            hidden = load_hidden(source, number * RANKS, rank, live, RANKS)
        at = number * RANKS + tl.arange(0, RANKS)
        mask = (at < rank)[:, None] & is_own[None, :]
        weights = tl.load(own[None, :] + at[:, None] * features, mask=mask, other=0.0)
        found = tl.dot(hidden, weights, found, input_precision="ieee")
    return found
