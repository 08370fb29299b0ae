"""Adapters at random, and steps whose rows use them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire.kernels.adapter_slots import (
    AdapterBatch,
    AdapterSlots,
    SortedRows,
    most_tiles,
    tile_rows,
)


def random_slots(
    count: int,
    sizes: Sequence[int],
    inputs: int,
    most_rank: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    experts: int = 1,
) -> AdapterSlots:
    """Some slots have no adapter for some outputs, some have a bias; what is in no use is NaN."""
    draw, outputs, features = random.Random(seed), len(sizes), sum(sizes)
    ranks = [
        tuple(draw.choice((0, 1, most_rank, draw.randint(0, most_rank))) for _ in sizes)
        for _ in range(count)
    ]
    starts = torch.tensor([[*accumulate(each, initial=0)] for each in ranks], dtype=torch.int32)
    biased = [draw.random() < 0.3 for _ in range(count)]
    a = torch.full((count * experts, outputs * most_rank, inputs), torch.nan)
    b = torch.full((count * experts, most_rank, features), torch.nan)
    bias = torch.full((count * experts, features), torch.nan)
    columns = [*accumulate(sizes, initial=0)]
    for number in range(count * experts):
        slot = number // experts
        a[number, : starts[slot, -1]] = torch.randn(int(starts[slot, -1]), inputs) * inputs**-0.5
        b[number, : max(ranks[slot])] = 0.0
        for i, rank in enumerate(ranks[slot]):
            own = b[number, :rank, columns[i] : columns[i + 1]]
            own.copy_(torch.randn(own.shape) * max(1, rank) ** -0.5)
        if biased[slot]:
            bias[number] = torch.randn(features)
    return AdapterSlots(
        a.to(dtype),
        b.to(dtype),
        bias.to(dtype),
        starts,
        torch.tensor(biased).int(),
        torch.tensor(columns, dtype=torch.int32),
        tuple(sizes),
        ranks,
        biased,
        experts,
    )


def random_batch(slots: Sequence[int], count: int = 5) -> AdapterBatch:
    """With all that backends of any device may read."""
    rows = SortedRows.of(np.array(slots, dtype=np.int32))
    tiles = np.empty((3, most_tiles(len(slots), count)), dtype=np.int32)
    rows.write_tiles(tile_rows(len(slots), count), tiles)
    return AdapterBatch(
        torch.from_numpy(rows.slots),
        torch.from_numpy(rows.order),
        torch.from_numpy(tiles),
        tile_rows(len(slots), count),
        rows.groups(),
        long_runs=rows.long_runs(),
    )


def on(device: str, slots: AdapterSlots, batch: AdapterBatch) -> tuple[AdapterSlots, AdapterBatch]:
    """The same on a device."""
    for each in (slots, batch):
        for name, value in vars(each).items():
            if isinstance(value, Tensor):
                object.__setattr__(each, name, value.to(device))
    return slots, batch
