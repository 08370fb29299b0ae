"""Adapters of long prompts before a gate: `activation(gate) * up` of the sums, run by run.

What comes out is read by one more matrix with adapters, and is by far the widest that any reads: to
multiply it by their `a` later would take as long as all other products `a x` of a layer together.
So a program goes over some of the features of its rows, and while it has them, multiplies them:

    features   0 ────► 768 ────► 1536 ── …     parts, a program each for the same rows
    sums       [part 0] [part 1] [part 2] …    of `a` and the part's features; added up afterwards,
                                               always in the same order
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import NO_ADAPTER, AdapterSlots, SlotRun
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.adapters.ranks import MOST_RANKS, ranks_together
from quire.kernels.triton.adapters.runs import load_hidden, multiply, rows_of
from quire.kernels.triton.sizes import cdiv

_ROWS = 64  # of a program
_FEATURES = 64  # of each of two outputs, computed at once
_MOST_STAGES = 3
_MOST_BYTES = 96 * 1024  # of shared memory, which most GPUs have for a program
_PART = 768  # features of a program: with more, the last programs leave much of a GPU idle


class Gated(NamedTuple):
    out: Tensor  # [rows, features]
    hidden: Tensor | None  # `a x` of the matrix that reads it, where that was asked for


def gated_runs(
    hidden: Tensor,
    slots: AdapterSlots,
    runs: tuple[SlotRun, ...],
    product: Tensor,
    activation: Activation,
    reader: AdapterSlots | None = None,
) -> Gated:
    """`activation(gate) * up` of `product` `[rows, 2 * features]` and what adapters add to it.

    `hidden` is what `shrink_runs` found.
    `reader`: those of the matrix that reads the result, if `can_shrink` them.
    """
    rows, size = len(product), slots.sizes[0]
    assert slots.sizes == (size, size) and product.stride(1) == 1
    out = torch.empty((rows, size), dtype=product.dtype, device=product.device)
    parts = cdiv(size, _PART)
    ranks = 0 if reader is None else ranks_together(reader)
    sums = torch.empty((parts, rows, ranks), dtype=torch.float32, device=product.device)
    for run in runs:
        slot = max(run.slot, 0)  # of none, nothing is read
        is_adapted = run.slot != NO_ADAPTER
        gate_rank, up_rank = slots.ranks[slot] if is_adapted else (0, 0)
        length = run.rows.stop - run.rows.start
        _gate_run[parts, cdiv(length, _ROWS)](
            hidden[run.rows],
            slots.b[slot],
            product[run.rows],
            out[run.rows],
            slots.b if reader is None else reader.a[slot],
            sums[:, run.rows],
            hidden.stride(0),
            product.stride(0),
            out.stride(0),
            sums.stride(0),
            length,
            gate_rank,
            up_rank,
            reader.ranks[slot][0] if reader is not None and is_adapted else 0,
            size,
            GELU=activation is Activation.GELU_TANH,
            ROWS=_ROWS,
            RANKS=ranks_together(slots),
            PASSES=cdiv(slots.most_rank, ranks_together(slots)),
            READER_RANKS=ranks,
            FEATURES=_FEATURES,
            PART=_PART,
            num_warps=4,
            num_stages=_stages(product.element_size(), slots, ranks),
        )
    return Gated(out, None if reader is None else sums.sum(0).to(out.dtype))


def _stages(item_size: int, slots: AdapterSlots, reader_ranks: int) -> int:
    """Tiles that a program asks for ahead of time, as far as there is room."""
    ranks = cdiv(slots.most_rank, ranks_together(slots)) * ranks_together(slots)
    numbers = _FEATURES * (2 * _ROWS + 2 * ranks + reader_ranks)
    return max(1, min(_MOST_STAGES, _MOST_BYTES // (item_size * numbers)))


def can_shrink(reader: AdapterSlots) -> bool:
    """Whether a program has room for the sums of all ranks."""
    return reader.experts == 1 and len(reader.sizes) == 1 and reader.most_rank <= MOST_RANKS


@triton.jit(do_not_specialize=["hidden_stride", "rows", "gate_rank", "up_rank", "rank"])
def _gate_run(
    hidden,
    b,
    product,
    out,
    a,
    sums,
    hidden_stride,
    product_stride,
    out_stride,
    part_stride,
    rows,
    gate_rank,
    up_rank,
    rank,
    size,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PASSES: tl.constexpr,
    READER_RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PART: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    part = tl.program_id(0)
    row = rows_of(tl.program_id(1), ROWS)
    live = row < rows
    of_gate = hidden + row * hidden_stride
    of_up = of_gate + gate_rank
    gate_hidden = load_hidden(of_gate, 0, gate_rank, live, RANKS)
    up_hidden = load_hidden(of_up, 0, up_rank, live, RANKS)
    if READER_RANKS > 0:
        lane = tl.arange(0, READER_RANKS)
        found = tl.zeros((ROWS, READER_RANKS), tl.float32)
    for first in range(part * PART, min(part * PART + PART, size), FEATURES):
        feature = first + tl.arange(0, FEATURES)
        is_own = feature < size
        mask = live[:, None] & is_own[None, :]
        at = product + row[:, None] * product_stride + feature[None, :]
        gate_before = tl.load(at, mask=mask, other=0.0)
        up_before = tl.load(at + size, mask=mask, other=0.0)
        own = b + feature
        gate = multiply(gate_hidden, of_gate, own, gate_rank, live, is_own, 2 * size, RANKS, PASSES)
        up = multiply(up_hidden, of_up, own + size, up_rank, live, is_own, 2 * size, RANKS, PASSES)
        gate = (gate + gate_before.to(tl.float32)).to(dtype).to(tl.float32)
        up = (up + up_before.to(tl.float32)).to(dtype).to(tl.float32)
        # Rounded before it is multiplied, as models were trained.
        result = (activate(gate, GELU).to(dtype).to(tl.float32) * up).to(dtype)
        tl.store(out + row[:, None] * out_stride + feature[None, :], result, mask=mask)
        if READER_RANKS > 0:
            weights = tl.load(
                a + lane[None, :] * size + feature[:, None],
                mask=(lane < rank)[None, :] & is_own[:, None],
                other=0.0,
            )
            found = tl.dot(result, weights, found, input_precision="ieee")
    if READER_RANKS > 0:
        to = sums + part * part_stride + row[:, None] * READER_RANKS + lane[None, :]
        tl.store(to, found, mask=live[:, None])
