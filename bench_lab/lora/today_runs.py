"""Adapters of long prompts: runs of neighbouring rows that use one slot, or none.

With many rows, what counts is how often the product of the matrix is read and written. A run needs
no table that says which rows are whose, so its programs have large tiles and little else to do;
`a x` is a product of its own, which libraries multiply as fast as it is read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterSlots, SlotRun
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.adapters.ranks import load_ranks, ranks_together

_ROWS = 64  # of a program
_FEATURES = 128  # the same
_GATED_FEATURES = 64  # of each of two outputs


def add_runs(x: Tensor, slots: AdapterSlots, runs: tuple[SlotRun, ...], product: Tensor) -> None:
    """Add to `product` `[rows, features]` what the adapters of all runs make of `x`."""
    for run in runs:
        if run.slot < 0:
            continue
        hidden, ranks = _hidden(x, slots, run), slots.ranks[run.slot]
        is_biased = slots.biased[run.slot]
        is_empty = not (is_biased or any(ranks))  # only before the first request: this compiles
        begin, start = 0, 0
        for size, rank in zip(slots.sizes, ranks, strict=True):
            if rank or is_biased or is_empty:
                out = product[run.rows, begin : begin + size]
                _add_run[triton.cdiv(size, _FEATURES), triton.cdiv(len(out), _ROWS)](
                    hidden,
                    slots.b[run.slot, :, begin:],
                    slots.bias[run.slot, begin:],
                    out,
                    hidden.stride(0),
                    out.stride(0),
                    len(out),
                    start,
                    rank,
                    int(is_biased),
                    size,
                    slots.b.shape[2],
                    ROWS=_ROWS,
                    **_ranks(slots),
                    FEATURES=_FEATURES,
                    num_warps=4,
                )
            begin, start = begin + size, start + rank


def gated_runs(
    x: Tensor,
    slots: AdapterSlots,
    runs: tuple[SlotRun, ...],
    product: Tensor,
    activation: Activation,
) -> Tensor:
    """`activation(gate) * up` of `product` `[rows, 2 * features]` and what adapters add to it."""
    size = slots.sizes[0]
    assert slots.sizes == (size, size) and product.stride(1) == 1
    out = torch.empty((len(product), size), dtype=product.dtype, device=product.device)
    for run in runs:
        adapted = run.slot >= 0
        slot = run.slot if adapted else 0  # of which nothing is read
        gate_rank, up_rank = slots.ranks[slot] if adapted else (0, 0)
        hidden = _hidden(x, slots, run) if adapted else product
        rows = run.rows.stop - run.rows.start
        blocks = triton.cdiv(size, _GATED_FEATURES)
        _gate_run[blocks, triton.cdiv(rows, _ROWS)](
            hidden,
            slots.b[slot],
            slots.bias[slot],
            product[run.rows],
            out[run.rows],
            hidden.stride(0),
            product.stride(0),
            out.stride(0),
            rows,
            gate_rank,
            up_rank,
            int(adapted and slots.biased[slot]),
            size,
            GELU=activation is Activation.GELU_TANH,
            ROWS=_ROWS,
            **_ranks(slots),
            FEATURES=_GATED_FEATURES,
            num_warps=8,
        )
    return out


def _hidden(x: Tensor, slots: AdapterSlots, run: SlotRun) -> Tensor:
    """`a x`: the ranks of one output after those of the other."""
    return F.linear(x[run.rows], slots.a[run.slot, : sum(slots.ranks[run.slot])])


def _ranks(slots: AdapterSlots) -> dict[str, int]:
    together = ranks_together(slots)
    return {"RANKS": together, "PASSES": triton.cdiv(slots.most_rank, together)}


@triton.jit(do_not_specialize=["hidden_stride", "rows", "start", "rank", "biased"])
def _add_run(
    hidden,
    b,
    bias,
    out,
    hidden_stride,
    out_stride,
    rows,
    start,
    rank,
    biased,
    size,
    features,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PASSES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    row = _rows_of(tl.program_id(1), ROWS)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    live, is_own = row < rows, feature < size
    mask = live[:, None] & is_own[None, :]
    at = out + row[:, None] * out_stride + feature[None, :]
    before = tl.load(at, mask=mask, other=0.0)
    added = tl.load(bias + feature, mask=feature < size * biased, other=0.0).to(tl.float32)
    source = hidden + row * hidden_stride + start
    found = _product(source, b + feature, rank, live, is_own, features, RANKS, PASSES)
    found += before.to(tl.float32) + added[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rows_of(number, ROWS: tl.constexpr):
    """The last of the run first: what the matrix's product wrote last may still be in the cache."""
    return ((tl.num_programs(1) - 1 - number) * ROWS + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def _product(source, own, rank, live, is_own, features, RANKS: tl.constexpr, PASSES: tl.constexpr):
    """The product of a tile's `a x` and some columns of `b`."""
    found = tl.zeros((live.shape[0], is_own.shape[0]), tl.float32)
    for number in tl.static_range(PASSES):  # one for most adapters
        at = number * RANKS + tl.arange(0, RANKS)
        mask = live[:, None] & (at < rank)[None, :]
        hidden = tl.load(source[:, None] + at[None, :], mask=mask, other=0.0)
        weights = load_ranks(own, number * RANKS, rank, is_own, features, RANKS)
        found = tl.dot(hidden, weights, found, input_precision="ieee")
    return found


@triton.jit(do_not_specialize=["hidden_stride", "rows", "gate_rank", "up_rank", "biased"])
def _gate_run(
    hidden,
    b,
    bias,
    product,
    out,
    hidden_stride,
    product_stride,
    out_stride,
    rows,
    gate_rank,
    up_rank,
    biased,
    size,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PASSES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    row = _rows_of(tl.program_id(1), ROWS)
    live = row < rows
    source = hidden + row * hidden_stride
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    is_own = feature < size
    mask = live[:, None] & is_own[None, :]
    at = product + row[:, None] * product_stride + feature[None, :]
    gate_before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up_before = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
    gate = _product(source, b + feature, gate_rank, live, is_own, 2 * size, RANKS, PASSES)
    up = _product(
        source + gate_rank, b + size + feature, up_rank, live, is_own, 2 * size, RANKS, PASSES
    )
    is_added = feature < size * biased
    gate += tl.load(bias + feature, mask=is_added, other=0.0).to(tl.float32)[None, :]
    up += tl.load(bias + size + feature, mask=is_added, other=0.0).to(tl.float32)[None, :]
    gate = (gate + gate_before).to(dtype).to(tl.float32)
    up = (up + up_before).to(dtype).to(tl.float32)
    # Rounded before it is multiplied, as models were trained.
    result = (activate(gate, GELU).to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(out + row[:, None] * out_stride + feature[None, :], result, mask=mask)
