"""The device's places for adapters: a sequence runs only while its adapter has one.

A slot is taken only from an adapter that no running sequence has, for the first waiting sequence
that needs one; sequences behind it go on if their adapters have slots. So that none waits for ever,
the slot that was taken first is emptied for each adapter that waits. Its adapter may begin only so
many more requests past those that wait as it had when it got the slot, and as a batch has places.
All other adapters go on as if none waited: a slot that is emptied has few rows. Towards the end of
much work a slot may be taken from an adapter that runs (`SlotExchange`).

    waiting   a8  d1  b4  a9 …     slots   a b c, taken in this order
                                   d1 waits for the slot of a; b4 passes it, a9 waits behind it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quire.engine.adapters.adapter import Adapter, AdapterRunner
from quire.engine.adapters.source import AdapterSource
from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.queues import Queues
from quire.engine.sequence import Sequence
from quire.runner.plan import StepPlan


class AdapterSlots:
    """Which adapter each slot has, or will have before the next step that needs it."""

    def __init__(
        self, runner: AdapterRunner, count: int, read_again: Callable[[AdapterSource], None]
    ) -> None:
        """`read_again` is asked for adapters that host memory no longer has."""
        self.count = count
        self.num_loads = 0
        self.num_requests = 0  # that came, for whichever adapter
        self._runner = runner
        self._read_again = read_again
        self._free = set(range(count))
        self._holders: dict[Adapter, None] = {}  # in the order in which they got their slots
        self._unloaded: dict[int, Adapter] = {}  # by slot, those that the device does not have yet
        self._promised: Adapter | None = None  # has a slot that was taken for it, and nothing runs
        # In this walk over the waiting sequences:
        self._batch_size = 0
        self._idle: set[Adapter] = set()  # have slots that may be taken
        self._turns: dict[Adapter, int] = {}  # of those in use: in which order slots are emptied
        self.refused: set[Adapter] = set()  # have no slot, and sequences that wait for one

    @property
    def adapters(self) -> list[Adapter]:
        return list(self._holders)

    # --- admission ------------------------------------------------------------------------------

    def begin_walk(self, queues: Queues) -> None:
        """The waiting sequences are tried in order: `admits` is asked of each."""
        in_use = queues.adapters_in_use()
        if self._promised in in_use:
            self._promised = None
        elif self._promised is not None and self._promised.requests:
            in_use.add(self._promised)
        self._batch_size = queues.max_num_seqs
        self._idle = {adapter for adapter in self._holders if adapter not in in_use}
        busy = (adapter for adapter in self._holders if adapter in in_use)
        self._turns = {adapter: turn for turn, adapter in enumerate(busy)}
        self.refused = set()

    def admits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may begin, as far as its adapter is concerned.

        Its slot is not taken from it in this walk.
        """
        if not self._may_begin(sequence):
            return False
        adapter = sequence.request.adapter
        if adapter is not None:
            if adapter.slot is None:
                self._take_slot(adapter)
            self._idle.discard(adapter)
        return True

    def admitted(self, sequence: Sequence) -> None:
        """It begins, behind `admits`."""
        adapter = sequence.request.adapter
        if adapter is not None and self._passes(sequence):
            adapter.num_passes -= 1

    def exchange(self, adapter: Adapter, awaited: Adapter) -> None:
        """No sequence of the first runs any more: its slot is for the second, even if others wait.

        That holds until its sequences begin, or a slot is exchanged again.
        """
        adapter.gave_way_with = next(iter(adapter.requests))
        self.free(adapter)
        self._take_slot(awaited)
        awaited.num_passes += 1  # the first has yet to begin
        self._promised = awaited

    def first(self, queues: Queues) -> Sequence | None:
        """The first waiting sequence that has a slot, could have one, or needs none."""
        self.begin_walk(queues)
        return next(filter(self._may_begin, queues.waiting), None)

    def is_in_use(self, adapter: Adapter) -> bool:
        """Whether a sequence has it that holds blocks, or may begin in this walk."""
        return adapter.slot is not None and adapter not in self._idle

    def _may_begin(self, sequence: Sequence) -> bool:
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        if adapter.slot is not None:
            return not self._passes(sequence) or not self._is_emptied(adapter)
        if adapter.is_in_host and (self._free or self._idle):
            return True
        if adapter not in self.refused:
            self.refused.add(adapter)
            if not adapter.is_in_host:
                assert sequence.request.lora is not None
                self._read_again(sequence.request.lora)
        return False

    def _passes(self, sequence: Sequence) -> bool:
        """Whether it begins before one that came earlier and waits for a slot.

        A request that has begun goes on: its other sequences may wait for this one.
        """
        request = sequence.request
        if request.num_cached_tokens is not None:
            return False
        return any(next(iter(each.requests)) < request.number for each in self.refused)

    def _is_emptied(self, adapter: Adapter) -> bool:
        """Whether its slot is for one of those that wait, which may still be read from a folder:
        then those of an idle adapter would go before it again and again."""
        if adapter is self._promised:
            return False
        missing = len(self.refused) - len(self._free) - len(self._idle - {adapter})
        turn = -1 if adapter in self._idle else self._turns.get(adapter, missing)
        return adapter.num_passes <= 0 and turn < missing

    def _take_slot(self, adapter: Adapter) -> None:
        """One that is free, or that of the adapter that is needed least."""
        if not self._free:
            self.free(min(self._idle, key=lambda each: each.need))
        slot = adapter.slot = min(self._free)
        self._free.remove(slot)
        self._holders[adapter] = None
        self._unloaded[slot] = adapter
        adapter.num_passes = min(len(adapter.requests), self._batch_size) - 1

    # --- the device -----------------------------------------------------------------------------

    def load(self, schedule: Schedule, plan: StepPlan) -> StepPlan:
        """Have the adapters of a step in their slots; what fails is tried again with the next.

        Returns the step's plan with the slot of each sequence, if any has an adapter.
        """
        adapters = [chunk.sequence.request.adapter for chunk in schedule.chunks]
        needed = {adapter for adapter in adapters if adapter is not None}
        for slot, adapter in list(self._unloaded.items()):
            if adapter in needed:
                self._runner.load_adapter(adapter.fingerprint, slot)
                del self._unloaded[slot]
                self.num_loads += 1
        if not needed:
            return plan
        slots = [-1 if adapter is None else adapter.slot for adapter in adapters]
        assert None not in slots, "a sequence runs whose adapter has no slot"
        return replace(plan, adapter_slots=np.array(slots, dtype=np.int32))

    def free(self, adapter: Adapter) -> None:
        """Its slot, if it has one, is for others."""
        if adapter.slot is not None:
            del self._holders[adapter]
            self._idle.discard(adapter)
            self._unloaded.pop(adapter.slot, None)
            self._free.add(adapter.slot)
            adapter.slot = None
            if self._promised is adapter:
                self._promised = None
