"""What adapters add to a product, of all rows and all slots of a step in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.numba.kernels import adapter_kernel
from quire.kernels.numba.sizes import LANES

SMALL = 1 << 16  # products, below which other threads are awake too late


def takes(x: Tensor, slots: AdapterSlots, out: Tensor) -> bool:
    """Whether the kernel is made for such tensors."""
    return (
        x.dtype == out.dtype == slots.a.dtype
        and x.stride(1) == out.stride(1) == 1
        and slots.a.shape[2] % LANES == 0
        and all(size % LANES == 0 for size in slots.sizes)
    )


def add(x: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor) -> None:
    """Add to `out` what the adapters of the rows of `x` do."""
    rows, tiles = len(batch.order), batch.tiles.shape[1]
    _, ranks, inputs = slots.a.shape
    _, most_rank, features = slots.b.shape
    hidden = torch.empty((rows, ranks), dtype=torch.float32)
    products = rows * most_rank * (inputs + features)
    adapter_kernel(
        x.dtype,
        1 if products < SMALL else torch.get_num_threads(),
        0,
        0,
        0,
        batch.tiles.data_ptr(),
        tiles,
        batch.order.data_ptr(),
        slots.starts.data_ptr(),
        slots.starts.stride(0),
        slots.is_biased.data_ptr(),
        slots.is_biased.stride(0),
        slots.columns.data_ptr(),
        len(slots.sizes),
        slots.experts,
        inputs,
        features,
        ranks,
        most_rank,
        slots.a.data_ptr(),
        slots.b.data_ptr(),
        slots.bias.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        hidden.data_ptr(),
        out.data_ptr(),
        out.stride(0),
    )
