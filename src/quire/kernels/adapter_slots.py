"""Adapters (LoRA), as kernels see them: what each slot adds to a matrix, and which rows use it.

An adapter adds `b (a x)` to a product, where `a` and `b` have few rows and columns: its rank. The
adapters of a matrix lie in slots. A step says which slot each of its rows uses, and the rows are
sorted by slot, so that a kernel multiplies tiles of rows that have the same small matrices:

    rows of the step   0 1 2 3 4 5 6      slots   2 - 0 2 0 0 -
    order              2 4 5 | 0 3 | 1 6          slot 0, slot 2, those without

Rows without an adapter are never written (`adapters.py` computes all this).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_ADAPTER = -1
MOST_RUNS = 8  # of neighbouring rows of one slot that a CPU multiplies one by one
FEW_ROWS = 4  # of a tile, where slots are so many that on average they have no more
LONG_RUN = 1024  # rows: steps of runs that are so long on average are multiplied run by run

Ints = npt.NDArray[np.int32]
Rows = slice | Tensor  # neighbours, or int64 indices


class SlotRun(NamedTuple):
    """Neighbouring rows of a step that use the same slot, or NO_ADAPTER."""

    slot: int
    rows: slice


@dataclass(frozen=True, eq=False)
class AdapterSlots:
    """The adapters of one matrix, whose product may be several outputs beside each other.

    Output `i` of a slot has rows `starts[i]` to `starts[i + 1]` of `a`, and the first rows of its
    columns of `b`. A slot without an adapter for an output has no rows there. Of a matrix that
    each of some experts has, a slot holds an adapter for each of them, all of the same ranks:
    expert `e` in slot `s` is number `s * experts + e`, which rows of a batch have as their slot.
    """

    a: Tensor  # [slots * experts, outputs * most rank, inputs]
    b: Tensor  # [slots * experts, most rank, features of all outputs]
    bias: Tensor  # [slots * experts, features of all outputs], or none where no slot is biased
    starts: Tensor  # int32 [slots, outputs + 1]
    is_biased: Tensor  # int32 [slots]
    columns: Tensor  # int32 [outputs + 1]: where the features of each output begin
    sizes: tuple[int, ...]  # of the outputs
    ranks: list[tuple[int, ...]]  # of each slot, by output, as the host knows them
    biased: list[bool]  # the same of `is_biased`
    experts: int = 1

    @property
    def most_rank(self) -> int:
        return self.b.shape[1]


@dataclass(frozen=True, eq=False)
class AdapterBatch:
    """Which slot each row of a step uses."""

    slots: Tensor  # int32 [rows], or NO_ADAPTER
    order: Tensor  # int32 [rows]: those that use slot 0, then slot 1, …
    tiles: Tensor  # int32 [3, tiles]: a slot or NO_ADAPTER, where its rows begin and end in `order`
    tile_rows: int  # of a tile, at most
    groups: tuple[tuple[int, Rows], ...] = ()  # the rows of each slot, if the host knows them
    host_slots: Ints | None = None  # `slots`, if the host knows them
    long_runs: tuple[
        SlotRun, ...
    ] = ()  # all rows in order, if the step has few slots and many rows
    derived: dict[object, AdapterBatch] = field(default_factory=dict)  # kept for later layers

    def with_expert(self, expert: int, count: int) -> AdapterBatch:
        """The same rows with one of `count` experts."""

        def number(slots: Tensor) -> Tensor:
            return torch.where(slots < 0, slots, slots * count + expert)

        groups = tuple((slot * count + expert, rows) for slot, rows in self.groups)
        tiles = self.tiles
        if len(tiles):
            tiles = torch.cat((number(tiles[:1]), tiles[1:]))
        return replace(
            self,
            slots=number(self.slots),
            tiles=tiles,
            groups=groups,
            host_slots=None,
            long_runs=(),
            derived={},
        )

    def with_all_experts(self, count: int) -> AdapterBatch:
        """Each row with each of `count` experts: pairs, numbered row by row."""
        experts = torch.arange(count, dtype=torch.int32, device=self.slots.device)
        rows, (slots, begins, ends) = len(self.order), self.tiles[:, None]
        # Expert by expert, for each the rows in their order.
        order = self.order * count + experts[:, None]
        shift = experts[:, None] * rows
        numbers = torch.where(slots < 0, slots, slots * count + experts[:, None])
        tiles = torch.stack((numbers, begins + shift, ends + shift)).flatten(1)
        of_rows = self.slots[:, None]
        return AdapterBatch(
            torch.where(of_rows < 0, of_rows, of_rows * count + experts).flatten(),
            order.flatten(),
            tiles,
            self.tile_rows,
            () if self.slots.is_cuda else tuple(self._pairs(count)),  # a GPU reads the tiles
        )

    def _pairs(self, count: int) -> Iterator[tuple[int, Rows]]:
        for slot, rows in self.groups:
            for expert in range(count):
                yield slot * count + expert, _with_expert(rows, expert, count)


def _with_expert(rows: Rows, expert: int, count: int) -> Rows:
    """Pairs of these rows and one of `count` experts."""
    if isinstance(rows, slice):
        return slice(rows.start * count + expert, rows.stop * count, count)
    return rows * count + expert


@dataclass(frozen=True)
class SortedRows:
    """The rows of a step by slot, on the host."""

    slots: Ints
    order: Ints
    bounds: list[tuple[int, int, int]]  # of each slot in use: its number, begin and end in `order`

    @classmethod
    def of(cls, slots: Ints) -> SortedRows:
        # As unsigned numbers, rows without an adapter are the last; short ones are sorted faster.
        kind = np.uint16 if slots.max(initial=0) < np.iinfo(np.uint16).max else np.uint32
        order = np.argsort(slots.astype(kind), kind="stable").astype(np.int32)
        count = int((slots >= 0).sum())
        used, begins = np.unique(slots[order[:count]], return_index=True)
        bounds = [*begins.tolist(), count]
        return cls(slots, order, list(zip(used.tolist(), bounds, bounds[1:], strict=False)))

    def on(self, device: torch.device) -> AdapterBatch:
        """As a device's products take them, which is not waited for."""
        size = tile_rows(len(self.order), len(self.bounds))
        tiles = np.empty((3, most_tiles(len(self.order), len(self.bounds))), dtype=np.int32)
        self.write_tiles(size, tiles)
        slots, order, there = (_to(each, device) for each in (self.slots, self.order, tiles))
        return AdapterBatch(slots, order, there, size, self.groups(), self.slots)

    def groups(self) -> tuple[tuple[int, Rows], ...]:
        """Neighbouring rows as a slice: they are read and written where they are. A slot may have
        several; one with many has indices instead."""
        found: list[tuple[int, Rows]] = []
        for slot, begin, end in self.bounds:
            own = self.order[begin:end]
            runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
            if len(runs) <= MOST_RUNS:
                found += [(slot, slice(int(run[0]), int(run[-1]) + 1)) for run in runs]
            else:
                found.append((slot, torch.from_numpy(own.astype(np.int64))))
        return tuple(found)

    def long_runs(self) -> tuple[SlotRun, ...]:
        """Nothing where runs are many, or short."""
        ends = [*(np.flatnonzero(np.diff(self.slots)) + 1).tolist(), len(self.slots)]
        if len(self.slots) <= LONG_RUN * len(ends):
            return ()
        begins = [0, *ends[:-1]]
        return tuple(
            SlotRun(int(self.slots[begin]), slice(begin, end))
            for begin, end in zip(begins, ends, strict=True)
        )

    def write_tiles(self, size: int, tiles: Ints) -> None:
        """Tiles of up to `size` rows of one slot, then of rows without one; the last are empty."""
        tiles[0], tiles[1:], number = NO_ADAPTER, 0, 0
        used = self.bounds[-1][2] if self.bounds else 0
        for slot, begin, end in [*self.bounds, (NO_ADAPTER, used, len(self.order))]:
            starts = np.arange(begin, end, size, dtype=np.int32)
            own = tiles[:, number : number + len(starts)]
            own[0], own[1], own[2] = slot, starts, np.minimum(starts + size, end)
            number += len(starts)


def _to(numbers: Ints, device: torch.device) -> Tensor:
    here = torch.from_numpy(numbers)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def tile_rows(rows: int, slots: int) -> int:
    """How many rows a tile has at most, in a step of so many that may use so many slots."""
    if 16 < rows <= min(128, FEW_ROWS * slots):
        return FEW_ROWS
    if rows <= 128:
        return 16
    return 32 if rows <= 1024 else 64


def most_tiles(rows: int, slots: int) -> int:
    """Each slot has a tile that may not be full, and so have the rows without one."""
    first = min(rows, slots + 1)
    return first + (rows - first) // tile_rows(rows, slots)
