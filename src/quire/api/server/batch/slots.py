"""How many lines are asked for at once, shared over tenants and over the batches of each.

    all slots ─ in equal parts ─► tenants with open batches ─ in equal parts ─► their batches

A batch that begins has its part at once. The parts of the others become smaller, but lines that are
under way go on: until they have ended, a few more are asked for than there are slots. A batch whose
last line has its slot keeps those of the lines that are under way, and leaves the rest to others.

Each line has a turn, by which the engine orders the lines that wait there, as in start-time fair
queueing: the turns of a batch go up with its lines, and begin at the turn that the engine has come
to. So a line stands beside the other tenants' next ones, and not behind all that they have sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from quire.api.server.keys import Tenant


class LineSlots:
    def __init__(self, count: int) -> None:
        self.count = count
        self.turn = 0  # the last one of which a line has been answered
        self._open: dict[Tenant, list[BatchSlots]] = {}

    @contextmanager
    def share(self, tenant: Tenant) -> Iterator[BatchSlots]:
        """A batch's part of the slots, while it runs."""
        of_tenant = self._open.setdefault(tenant, [])
        part = BatchSlots(self, tenant)
        of_tenant.append(part)
        try:
            yield part
        finally:
            of_tenant.remove(part)
            if not of_tenant:
                del self._open[tenant]
            self.wake()

    def wake(self) -> None:
        """Some batches may have more slots now."""
        for part in self._parts():
            part.changed.set()

    def num_asking(self, tenant: Tenant) -> int:
        """A tenant's batches that ask for more lines."""
        return sum(part.asks_more for part in self._open[tenant])

    def most(self, tenant: Tenant) -> int:
        """How many each batch of a tenant may have at once: its equal part, or more, where batches
        that ask for no more lines leave some of theirs."""
        equal = self.count // len(self._open) // len(self._open[tenant])
        left = self.count - sum(part.num_taken for part in self._parts() if not part.asks_more)
        tenants = sum(self.num_asking(each) > 0 for each in self._open)
        return max(1, equal, left // tenants // self.num_asking(tenant))

    def _parts(self) -> Iterator[BatchSlots]:
        return (part for parts in self._open.values() for part in parts)


class BatchSlots:
    """The slots of one batch; one task alone acquires them."""

    def __init__(self, slots: LineSlots, tenant: Tenant) -> None:
        self.changed = asyncio.Event()
        self.num_taken = 0
        self.asks_more = True
        self._slots = slots
        self._tenant = tenant
        self._next_turn = 0

    async def acquire(self) -> int:
        """Wait for a slot; returns the turn of the line that has it."""
        while self.num_taken >= self._slots.most(self._tenant):
            self.changed.clear()
            await self.changed.wait()
        self.num_taken += 1
        turn = max(self._next_turn, self._slots.turn)
        # A tenant's batches together have as many turns as the one batch of another.
        self._next_turn = turn + self._slots.num_asking(self._tenant)
        return turn

    def reach(self, turn: int) -> None:
        """A line that had this turn has its answer."""
        self._slots.turn = max(self._slots.turn, turn)

    def release(self) -> None:
        self.num_taken -= 1
        if self.asks_more:
            self.changed.set()
        else:
            self._slots.wake()

    def ask_no_more(self) -> None:
        """The batch's last line has its slot: others may have those that it leaves."""
        self.asks_more = False
        self._slots.wake()
