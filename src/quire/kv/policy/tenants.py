"""The eviction queues of each tenant, and which tenant's block is worth the least of all.

A heap has one entry for each tenant, with the rank of its least valuable run, or a lower one. What
the heap says is checked when a tenant comes out of it, and put right.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import count

from quire.kv.policy.eviction_queues import EvictionQueues, Run
from quire.kv.policy.reuse_model import ReuseModel


class TenantQueues(EvictionQueues):
    """One tenant's queues, which announce a run that is worth less than all they hold."""

    def __init__(self, model: ReuseModel, tenants: Tenants) -> None:
        super().__init__(model)
        self.entry: Entry | None = None  # in the heap; older entries of these queues are stale
        self._tenants = tenants

    def put(self, run: Run) -> None:
        super().put(run)
        self._tenants.announce(self, self._model.rank[run.cell], run.born)


Entry = tuple[int, float, int, TenantQueues]  # rank, when its run was born, number of the entry


class Tenants:
    """Without quotas everyone is one tenant, and none of this costs anything."""

    def __init__(self, model: ReuseModel, *, have_quotas: bool) -> None:
        self._model = model
        self._everyone = None if have_quotas else EvictionQueues(model)
        self._queues: dict[Hashable, TenantQueues] = {}
        self._heap: list[Entry] = []
        self._numbers = count()

    def queues_of(self, tenant: Hashable) -> EvictionQueues:
        if self._everyone is not None:
            return self._everyone
        queues = self._queues.get(tenant)
        if queues is None:
            queues = self._queues[tenant] = TenantQueues(self._model, self)
        return queues

    def all(self) -> Iterable[EvictionQueues]:
        return self._queues.values() if self._everyone is None else (self._everyone,)

    def apart(
        self, rows: Sequence[int], tenants: Sequence[Hashable]
    ) -> Iterable[tuple[EvictionQueues, list[int]]]:
        """Some of the rows, whose tenants these are, by tenant."""
        if self._everyone is not None:
            return [(self._everyone, list(rows))]
        found: dict[Hashable, list[int]] = {}
        for row in rows:
            found.setdefault(tenants[row], []).append(row)
        return [(self.queues_of(who), theirs) for who, theirs in found.items()]

    def announce(self, queues: TenantQueues, rank: int, born: float) -> None:
        """A run of that rank has come into these queues."""
        if queues.entry is None or rank < queues.entry[0]:
            queues.entry = entry = (rank, born, next(self._numbers), queues)
            heapq.heappush(self._heap, entry)

    def first(self) -> Run | None:
        """A run of the least valuable cell, the oldest of the tenants' first ones."""
        if self._everyone is not None:
            return self._everyone.first()
        heap = self._heap
        while heap:
            entry = heap[0]
            queues = entry[3]
            if queues.entry is not entry:  # one of a lower rank has come since
                heapq.heappop(heap)
                continue
            run = queues.first()
            if run is None:
                queues.entry = None
                heapq.heappop(heap)
                continue
            rank = self._model.rank[run.cell]
            if (rank, run.born) == entry[:2]:
                return run
            queues.entry = (rank, run.born, next(self._numbers), queues)
            heapq.heapreplace(heap, queues.entry)
        return None

    def reorder(self) -> None:
        """The model's values have changed. Tenants that hold nothing any more are forgotten."""
        if self._everyone is not None:
            self._everyone.reorder()
            return
        self._queues = {who: each for who, each in self._queues.items() if each.num_resident}
        self._heap.clear()
        for queues in self._queues.values():
            queues.reorder()
            queues.entry = None
            self.announce(queues, 0, 0)
