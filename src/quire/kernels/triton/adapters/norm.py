"""The second small product of adapters, by the norm that adds the matrix's product to the stream.

A decode's launches take longer to begin than to compute. A program has a row, as that of any norm
(`triton/norm.py`), and all of `b` of the row's slot: it is asked for before the matrix's product is
done (`pdl.py`), as far as registers hold it.

    sum      product + b (a x) + bias     rounded as `expand` writes it
    stream   stream + sum                 rounded, then normalised
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.triton.adapters.ranks import TABLES, load_ranks
from quire.kernels.triton.norm import normalised
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import next_power_of_2

_MOST_ROWS = 128  # no more than run at once: rows of one slot each read its `b`
_MOST_BYTES = 128 * 1024  # of `b` for a row, which one multiprocessor reads in a microsecond
_HELD_BYTES = 256  # of them for a thread at once
_FEATURES = 8  # of a thread, read as one vector


def can_add(rows: int, slots: AdapterSlots) -> bool:
    """Whether `add_adapted_norm` is the faster way for a step of so many rows."""
    of_slot = slots.b[0].nbytes
    return rows <= _MOST_ROWS and len(slots.sizes) == 1 and of_slot <= _MOST_BYTES


def add_adapted_norm(
    stream: Tensor,
    product: Tensor,
    hidden: Tensor,
    slots: AdapterSlots,
    batch: AdapterBatch,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """As `add_rms_norm`, of `product` and what adapters add to it. `hidden` is
    `[1, rows, slots * ranks]` of all slots, or `[1, rows, ranks]` of each row's own."""
    rows, features = stream.shape
    assert len(hidden) == product.stride(1) == hidden.stride(2) == 1
    out = torch.empty((rows, features), dtype=stream.dtype, device=stream.device)
    if rows == 0:
        return out
    ranks, width = slots.most_rank, next_power_of_2(features)
    warps = max(1, min(16, width // (32 * _FEATURES)))
    held = max(1, _HELD_BYTES // slots.b.element_size() * 32 * warps // width)
    _add_adapted_norm[(rows,)](
        stream,
        product,
        hidden,
        slots.b,
        slots.bias,
        slots.starts,
        slots.is_biased,
        batch.slots,
        weight,
        out,
        eps,
        stream.stride(0),
        product.stride(0),
        hidden.stride(1),
        ranks if hidden.shape[2] > ranks else 0,  # from one slot to the next
        slots.starts.stride(0),
        slots.is_biased.stride(0),
        FEATURES=features,
        WIDTH=width,
        MOST_RANK=ranks,
        RANKS=min(held, next_power_of_2(ranks)),
        num_warps=warps,
        **pdl_launch(stream.device),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=TABLES)
def _add_adapted_norm(
    stream,
    product,
    hidden,
    b,
    bias,
    starts,
    is_biased,
    slots,
    weight,
    out,
    eps,
    stream_stride,
    product_stride,
    hidden_stride,
    slot_stride,
    starts_stride,
    biased_stride,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = stream.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    live = lane < FEATURES
    slot = tl.load(slots + row)
    adapted = slot >= 0
    rank = tl.load(starts + slot * starts_stride + 1, mask=adapted, other=0)
    biased = tl.load(is_biased + slot * biased_stride, mask=adapted, other=0)  # 0 or 1
    slot = slot.to(tl.int64)
    own = b + slot * MOST_RANK * FEATURES + lane
    weights = load_ranks(own, 0, rank, live, FEATURES, RANKS)
    found = tl.load(bias + slot * FEATURES + lane, mask=lane < FEATURES * biased, other=0.0)
    found = found.to(tl.float32)
    scale = tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)
    trigger_then_wait(PDL)
    x = tl.load(stream + row * stream_stride + lane, mask=live, other=0.0).to(tl.float32)
    before = tl.load(product + row * product_stride + lane, mask=live, other=0.0)
    source = hidden + row * hidden_stride + slot * slot_stride
    for first in tl.static_range(0, MOST_RANK, RANKS):
        if first > 0:
            weights = load_ranks(own, first, rank, live, FEATURES, RANKS)
        at = first + tl.arange(0, RANKS)
        factors = tl.load(source + at, mask=at < rank, other=0.0).to(weights.dtype)
        found += tl.sum(factors.to(tl.float32)[:, None] * weights.to(tl.float32), 0)
    x += (found + before.to(tl.float32)).to(dtype).to(tl.float32)
    total = x.to(dtype)
    tl.store(stream + row * stream_stride + lane, total, mask=live)
    rounds: tl.constexpr = weight.dtype.element_ty == dtype
    normed = normalised(total.to(tl.float32), scale, eps, FEATURES, dtype, rounds)
    tl.store(out + row * FEATURES + lane, normed, mask=live)
