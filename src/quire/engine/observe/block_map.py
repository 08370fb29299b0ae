"""The blocks of every tier as a picture: a value for each cell, few enough to send often.

A cell is one block, or a run of neighbours where there are more blocks than cells. Pictures are
bytes in base64, one plane after the other of `cells` bytes each:

    holders   0 free, 1 cached, 2 held by one, 3 by two, …; of several blocks the busiest
    owner     two planes, low byte and high byte: which of `owners` holds it, counted from 1
    in_use    of how many 255ths of the cell's blocks this is so; only where a cell is several
    cached
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.observe.block_owners import NO_OWNER, Holdings, take_stock
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Sequence

MOST_CELLS = 8192
MOST_OWNERS = 1024
FREE, CACHED, HELD = 0, 1, 2

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


def block_map(scheduler: Scheduler, tenant: str = "") -> dict[str, Any]:
    """All tiers. Requests of other tenants have no names in it."""
    tiering = scheduler.tiering
    lower, slots = tiering.store_stats(), tiering.slot_states()
    tiers = {name: _tier(stats, slots.get(name)) for name, stats in lower.items()}
    return {
        "block_size": scheduler.cache.block_size,
        "step": scheduler.step_number,
        "tiers": {"device": _device(scheduler, tenant), **tiers},
    }


def _device(scheduler: Scheduler, tenant: str) -> dict[str, Any]:
    allocator, stock = scheduler.cache.allocator, take_stock(scheduler)
    state = _states(stock)
    per_cell = _per_cell(len(state))
    busiest = _busiest(state, per_cell)
    owners = np.where(stock.owner < MOST_OWNERS, stock.owner, NO_OWNER)[busiest] + 1
    planes = [state[busiest], (owners & 255).astype(np.uint8), (owners >> 8).astype(np.uint8)]
    if per_cell > 1:
        planes += [_share(stock.in_use, per_cell), _share(stock.cached, per_cell)]
    return {
        "total": allocator.num_blocks,
        "free": allocator.num_free,
        "cached": allocator.num_cached,
        "in_use": allocator.num_in_use,
        "shared": int((stock.holders > 1).sum()),
        "owners": [_owner(sequence, tenant) for sequence in stock.sequences[:MOST_OWNERS]],
        **_picture(planes, per_cell),
    }


def _states(stock: Holdings) -> Bytes:
    held = np.minimum(stock.holders + 1, 255)
    return np.where(stock.in_use, held, stock.is_keyed).astype(np.uint8)


def _owner(sequence: Sequence, tenant: str) -> dict[str, Any]:
    request = sequence.request
    mine = request.namespace.startswith(tenant)
    return {
        "number": request.number,
        "sample": sequence.sample,
        "request": request.id if mine else None,
        "blocks": len(sequence.table) if sequence.table is not None else 0,
    }


def _tier(stats: dict[str, Any], states: Bytes | None) -> dict[str, Any]:
    """A lower tier: its counts, and a picture where it knows its slots."""
    told = {name: value for name, value in stats.items() if isinstance(value, (int, float, str))}
    if states is None or not len(states):
        return told
    per_cell = _per_cell(len(states))
    planes = [states[_busiest(states, per_cell)]]
    if per_cell > 1:
        planes += [_share(states >= HELD, per_cell), _share(states == CACHED, per_cell)]
    return {
        **told,
        "total": len(states),
        "free": int((states == FREE).sum()),
        "cached": int((states == CACHED).sum()),
        "in_use": int((states >= HELD).sum()),
        **_picture(planes, per_cell),
    }


def _picture(planes: list[Bytes], per_cell: int) -> dict[str, Any]:
    packed = b64encode(np.concatenate(planes).tobytes()).decode()
    return {"cells": len(planes[0]), "blocks_per_cell": per_cell, "picture": packed}


def _per_cell(count: int) -> int:
    return max(1, -(-count // MOST_CELLS))


def _busiest(state: Bytes, per_cell: int) -> npt.NDArray[np.intp]:
    """For each cell the block that stands for it."""
    if per_cell == 1:
        return np.arange(len(state))
    rows = _in_cells(state, per_cell)
    busiest: npt.NDArray[np.intp] = rows.argmax(axis=1) + np.arange(len(rows)) * per_cell
    return busiest


def _share(flags: Flags, per_cell: int) -> Bytes:
    """In 255ths, and never none where there is one."""
    rows = _in_cells(flags, per_cell)
    share: Bytes = np.ceil(rows.mean(axis=1) * 255).astype(np.uint8)
    return share


def _in_cells(values: npt.NDArray[Any], per_cell: int) -> npt.NDArray[Any]:
    return np.pad(values, (0, -len(values) % per_cell)).reshape(-1, per_cell)


def holders_of(block: int, sequences: Collection[Sequence]) -> list[tuple[Sequence, int]]:
    """Who holds a block, and at which place of its table."""
    found = []
    for sequence in sequences:
        for table in sequence.table.groups if sequence.table is not None else ():
            places = np.flatnonzero(table.ids == block) + table.first
            found += [(sequence, place) for place in places.tolist()]
    return found
