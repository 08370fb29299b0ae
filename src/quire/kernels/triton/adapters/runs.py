"""Adapters of long prompts: runs of neighbouring rows that use one slot, or none.

With many rows, what counts is how often the product of the matrix is read and written. A run needs
no table that says which rows are whose, so its programs have large tiles and little else to do;
`a x` is a product of its own, which libraries multiply as fast as it is read. Adapters with a bias,
which are rare and would cost all others registers, go the way of short runs (`expand.py`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import AdapterSlots, SlotRun
from quire.kernels.triton.adapters.ranks import ALIGNMENT, TABLES, ranks_together
from quire.kernels.triton.sizes import cdiv

_ROWS = 64  # of a program
_FEATURES = 128  # the same


def shrink_runs(x: Tensor, slots: AdapterSlots, runs: tuple[SlotRun, ...]) -> Tensor:
    """`a x`, the ranks of one output after those of the other; what no adapter has is left as it
    was."""
    hidden = torch.empty((len(x), slots.a.shape[1]), dtype=x.dtype, device=x.device)
    for run in runs:
        if run.slot >= 0:
            used = sum(slots.ranks[run.slot])
            torch.mm(x[run.rows], slots.a[run.slot, :used].t(), out=hidden[run.rows, :used])
    return hidden


def add_runs(
    hidden: Tensor, slots: AdapterSlots, runs: tuple[SlotRun, ...], product: Tensor
) -> None:
    """Add to `product` `[rows, features]` what the adapters of all runs make of `hidden`, which
    `shrink_runs` found."""
    for run in runs:
        if run.slot >= 0:
            _expand_run(hidden[run.rows], slots, run.slot, product[run.rows], adds=True)


def multiply_runs(
    x: Tensor, weight: Tensor, hidden: Tensor, slots: AdapterSlots, runs: tuple[SlotRun, ...]
) -> Tensor:
    """The product of a matrix, and what adapters add to it.

    Theirs is written first, and the matrix's is added to that, by the same launch that computes it:
    it has time to read while it multiplies, and nothing is read and written once more.
    """
    product = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    for run in runs:
        out = product[run.rows]
        if run.slot < 0:
            torch.mm(x[run.rows], weight.t(), out=out)
        else:
            _expand_run(hidden[run.rows], slots, run.slot, out, adds=False)
            out.addmm_(x[run.rows], weight.t())
    return product


def _expand_run(
    hidden: Tensor, slots: AdapterSlots, slot: int, product: Tensor, adds: bool
) -> None:
    outputs, (rows, features) = len(slots.sizes), product.shape
    _expand[features // _FEATURES + outputs, cdiv(rows, _ROWS)](
        hidden,
        slots.b[slot],
        slots.columns,
        slots.starts,
        product,
        hidden.stride(0),
        product.stride(0),
        rows,
        slot,
        slots.starts.stride(0),
        features,
        ADDS=adds,
        OUTPUTS=outputs,
        ALIGNMENT=math.gcd(ALIGNMENT, *slots.sizes),
        ROWS=_ROWS,
        RANKS=ranks_together(slots),
        PASSES=cdiv(slots.most_rank, ranks_together(slots)),
        FEATURES=_FEATURES,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["hidden_stride", "rows", "slot"], do_not_specialize_on_alignment=TABLES
)
def _expand(
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
    ADDS: tl.constexpr,
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
    if rank > 0 or not ADDS:
        mask = live[:, None] & is_own[None, :]
        at = out + row[:, None] * out_stride + feature[None, :]
        if ADDS:
            before = tl.load(at, mask=mask, other=0.0)
        source = hidden + row * hidden_stride + start
        first = load_hidden(source, 0, rank, live, RANKS)
        found = multiply(first, source, b + feature, rank, live, is_own, features, RANKS, PASSES)
        if ADDS:
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
