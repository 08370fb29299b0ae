"""The device's places for adapters: a sequence runs only while its adapter has one.

A slot is taken only from an adapter that no running sequence has, for the first waiting sequence
that needs one; sequences behind it go on if their adapters have slots. So that none waits for ever,
an adapter lets at most `MOST_OVERTAKES` of its sequences pass one that waits for a slot; then its
slot empties, and goes to the adapter of that one.

    waiting   a1  d1  b4  a7 …      slots   a b c      d1 waits; b4 and a7 overtake it, and count
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.engine.adapters.adapter import Adapter, AdapterRunner
from quire.engine.adapters.source import AdapterSource
from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.queues import Queues
from quire.engine.sequence import Sequence
from quire.runner.plan import Ints

MOST_OVERTAKES = 16


class AdapterSlots:
    """Which adapter each slot has, or will have before the next step that needs it."""

    def __init__(
        self, runner: AdapterRunner, count: int, read_again: Callable[[AdapterSource], None]
    ) -> None:
        """`read_again` is asked for adapters that host memory no longer has."""
        self._runner = runner
        self._read_again = read_again
        self._adapters: list[Adapter | None] = [None] * count
        self._unloaded: dict[int, Adapter] = {}  # by slot, those that the device does not have yet
        self._in_use: set[Adapter] = set()  # by sequences that hold blocks
        self._is_full = False  # every slot's adapter is in use
        self._has_refused = False  # in this walk over the waiting sequences
        self._asked: set[Adapter] = set()  # to be read again, in this walk
        self.num_loads = 0

    @property
    def count(self) -> int:
        return len(self._adapters)

    @property
    def adapters(self) -> list[Adapter]:
        return [adapter for adapter in self._adapters if adapter is not None]

    # --- admission ------------------------------------------------------------------------------

    def begin_walk(self, queues: Queues) -> None:
        """The waiting sequences are tried in order: `admits` is asked of each with an adapter."""
        self._in_use = queues.adapters_in_use()
        self._is_full = self._has_refused = False
        self._asked.clear()

    def admits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may begin, as far as its adapter is concerned."""
        adapter = sequence.request.adapter
        assert adapter is not None
        if adapter.slot is None and not self._find_slot(sequence, adapter):
            self._has_refused = True
            return False
        return not self._overtakes(sequence) or adapter.num_overtakes < MOST_OVERTAKES

    def admitted(self, sequence: Sequence) -> None:
        """It begins, behind `admits`."""
        adapter = sequence.request.adapter
        assert adapter is not None
        self._in_use.add(adapter)
        adapter.num_overtakes += self._overtakes(sequence)

    def first(self, queues: Queues) -> Sequence | None:
        """The first waiting sequence that has a slot, could have one, or needs none."""
        in_use = queues.adapters_in_use() if queues.waiting else set()
        is_full = all(adapter in in_use for adapter in self._adapters)

        def may_begin(sequence: Sequence) -> bool:
            adapter = sequence.request.adapter
            if adapter is None:
                return True
            if adapter.slot is None:
                return adapter.is_in_host and not is_full
            return adapter.num_overtakes < MOST_OVERTAKES or not self._overtakes(sequence)

        return next(filter(may_begin, queues.waiting), None)

    def _overtakes(self, sequence: Sequence) -> bool:
        """A request that has begun goes on: its other sequences may wait for this one."""
        return self._has_refused and sequence.request.num_cached_tokens is None

    def _find_slot(self, sequence: Sequence, adapter: Adapter) -> bool:
        if not adapter.is_in_host:
            if adapter not in self._asked:
                assert sequence.request.lora is not None
                self._asked.add(adapter)
                self._read_again(sequence.request.lora)
            return False
        slot = self._free_slot()
        if slot is None:
            return False
        if (before := self._adapters[slot]) is not None:
            before.slot = None
        self._unloaded[slot] = self._adapters[slot] = adapter
        adapter.slot, adapter.num_overtakes = slot, 0
        return True

    def _free_slot(self) -> int | None:
        """One without an adapter, or that of the adapter that is needed least."""
        if self._is_full:
            return None
        if None in self._adapters:
            return self._adapters.index(None)
        idle = [adapter for adapter in self.adapters if adapter not in self._in_use]
        self._is_full = not idle
        return min(idle, key=lambda adapter: adapter.need).slot if idle else None

    # --- the device -----------------------------------------------------------------------------

    def load(self, schedule: Schedule) -> Ints:
        """Have the adapters of a step in their slots; what fails is tried again with the next.

        Returns the slot of each sequence, -1 without; nothing where no sequence has an adapter.
        """
        adapters = [chunk.sequence.request.adapter for chunk in schedule.chunks]
        needed = {adapter for adapter in adapters if adapter is not None}
        for slot, adapter in list(self._unloaded.items()):
            if adapter in needed:
                self._runner.load_adapter(adapter.fingerprint, slot)
                del self._unloaded[slot]
                self.num_loads += 1
        slots = [-1 if adapter is None else adapter.slot for adapter in adapters]
        assert None not in slots, "a sequence runs whose adapter has no slot"
        return np.array(slots if needed else [], dtype=np.int32)

    def free(self, adapter: Adapter) -> None:
        """Its slot, if it has one, is for others."""
        if adapter.slot is not None:
            self._adapters[adapter.slot] = None
            self._unloaded.pop(adapter.slot, None)
            adapter.slot = None
