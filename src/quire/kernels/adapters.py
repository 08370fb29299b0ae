"""What adapters add to a product: the plain sums, and what is fastest on a device."""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots, Rows

log = logging.getLogger("quire")

MANY = 256  # rows of a slot, on average, above which torch multiplies faster on a CPU


def add_plainly(x: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor) -> None:
    """The reference, row by row: `a x` is rounded to the type of `x`, as `peft` does; the rest is
    summed in float32 and rounded once."""
    begins = slots.columns.tolist()
    for row, slot in enumerate(batch.slots.tolist()):
        if slot < 0:
            continue
        starts = slots.starts[slot // slots.experts].tolist()
        is_biased = bool(slots.is_biased[slot // slots.experts])
        for i, features in enumerate(slots.sizes):
            rank, columns = starts[i + 1] - starts[i], slice(begins[i], begins[i] + features)
            a = slots.a[slot, starts[i] : starts[i + 1]].float()
            b = slots.b[slot, :rank, columns].float()
            added = (a @ x[row].float()).to(x.dtype).float() @ b
            if is_biased:
                added += slots.bias[slot, columns].float()
            if rank or is_biased:
                out[row, columns] = (out[row, columns].float() + added).to(out.dtype)


def add_adapters(x: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor) -> None:
    """Add to `out` `[rows, features]` what the adapters of the rows of `x` do."""
    if x.is_cuda:
        from quire.kernels.triton.adapters.expand import expand
        from quire.kernels.triton.adapters.shrink import shrink

        expand(shrink(x, slots, batch), slots, batch, out)
        return
    if len(x) <= MANY * max(1, len(batch.groups)) and has_cpu_kernel(x.dtype):
        from quire.kernels.numba.adapters import add, takes

        if takes(x, slots, out):
            add(x, slots, batch, out)
            return
    add_by_groups(x, slots, batch, out)


@cache
def has_cpu_kernel(dtype: torch.dtype) -> bool:
    """Whether a CPU has a kernel for numbers of this type; if there can be one, there will be."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        from quire.kernels.numba.kernels import adapter_kernel

        adapter_kernel.compile(dtype)
    except Exception as error:  # whatever it is, torch multiplies, too
        log.warning("The CPU kernel of adapters is off, which costs speed: %s", error)
        return False
    return True


def add_by_groups(x: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor) -> None:
    """On a CPU by torch: slot by slot, for all of its rows."""
    for slot, rows in batch.groups:
        if any(slots.ranks[slot // slots.experts]):
            _add_group(x, slots, slot, rows, out)
        if slots.biased[slot // slots.experts]:
            out[rows] += slots.bias[slot]


def _add_group(x: Tensor, slots: AdapterSlots, slot: int, rows: Rows, out: Tensor) -> None:
    """All rows of one slot, by torch: one product, then one for each output."""
    ranks = slots.ranks[slot // slots.experts]
    own = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
    hidden = F.linear(own, slots.a[slot, : sum(ranks)]).to(out.dtype)  # of one row, by BLAS
    first = column = 0
    for rank, features in zip(ranks, slots.sizes, strict=True):
        if rank:
            columns = slice(column, column + features)
            part, b = hidden[:, first : first + rank], slots.b[slot, :rank, columns].to(out.dtype)
            if isinstance(rows, slice):
                out[rows, columns].addmm_(part, b)
            else:
                out[:, columns].index_add_(0, rows, part @ b)
        first, column = first + rank, column + features
