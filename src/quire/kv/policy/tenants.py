"""The shelves of each tenant, and which tenant's block is worth the least of all.

A heap has one entry for each tenant, with the rank of its least valuable run, or a lower one. What
the heap says is checked when a tenant comes out of it, and put right.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import count

from quire.kv.policy.eviction_queues import EvictionQueues, Run
from quire.kv.policy.reuse_model import ReuseModel


class TenantShelves(EvictionQueues):
    """One tenant's, which say when a run comes that is worth less than those they have."""

    def __init__(self, model: ReuseModel, tenants: Tenants) -> None:
        super().__init__(model)
        self.entry: Entry | None = None  # in the heap; others of these shelves are out of date
        self._tenants = tenants

    def put(self, run: Run) -> None:
        super().put(run)
        self._tenants.announce(self, self._model.rank[run.cell], run.born)


Entry = tuple[int, float, int, TenantShelves]  # rank, when its run was born, number of the entry


class Tenants:
    """Without quotas everyone is one tenant, and none of this costs anything."""

    def __init__(self, model: ReuseModel, *, have_quotas: bool) -> None:
        self._model = model
        self._everyone = None if have_quotas else EvictionQueues(model)
        self._shelves: dict[Hashable, TenantShelves] = {}
        self._heap: list[Entry] = []
        self._numbers = count()

    def shelves_of(self, tenant: Hashable) -> EvictionQueues:
        if self._everyone is not None:
            return self._everyone
        shelves = self._shelves.get(tenant)
        if shelves is None:
            shelves = self._shelves[tenant] = TenantShelves(self._model, self)
        return shelves

    def all(self) -> Iterable[EvictionQueues]:
        return self._shelves.values() if self._everyone is None else (self._everyone,)

    def apart(
        self, rows: Sequence[int], tenants: Sequence[Hashable]
    ) -> Iterable[tuple[EvictionQueues, list[int]]]:
        """Some of the rows, whose tenants these are, by tenant."""
        if self._everyone is not None:
            return [(self._everyone, list(rows))]
        found: dict[Hashable, list[int]] = {}
        for row in rows:
            found.setdefault(tenants[row], []).append(row)
        return [(self.shelves_of(who), theirs) for who, theirs in found.items()]

    def announce(self, shelves: TenantShelves, rank: int, born: float) -> None:
        """A run of that rank has come onto these shelves."""
        if shelves.entry is None or rank < shelves.entry[0]:
            shelves.entry = entry = (rank, born, next(self._numbers), shelves)
            heapq.heappush(self._heap, entry)

    def first(self) -> Run | None:
        """A run of the least valuable cell, the oldest of the tenants' first ones."""
        if self._everyone is not None:
            return self._everyone.first()
        heap = self._heap
        while heap:
            entry = heap[0]
            shelves = entry[3]
            if shelves.entry is not entry:  # one of a lower rank has come since
                heapq.heappop(heap)
                continue
            run = shelves.first()
            if run is None:
                shelves.entry = None
                heapq.heappop(heap)
                continue
            rank = self._model.rank[run.cell]
            if (rank, run.born) == entry[:2]:
                return run
            shelves.entry = (rank, run.born, next(self._numbers), shelves)
            heapq.heapreplace(heap, shelves.entry)
        return None

    def reorder(self) -> None:
        """The model's values have changed. Tenants that hold nothing any more are forgotten."""
        if self._everyone is not None:
            self._everyone.reorder()
            return
        self._shelves = {who: each for who, each in self._shelves.items() if each.num_resident}
        self._heap.clear()
        for shelves in self._shelves.values():
            shelves.reorder()
            shelves.entry = None
            self.announce(shelves, 0, 0)
