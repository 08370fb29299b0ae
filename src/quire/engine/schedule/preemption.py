"""Blocks for running sequences, when too few are left: who gives up its own."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.adapters.no_slots import NO_SLOTS, NoSlots
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.prefixes import Prefixes
from quire.engine.schedule.queues import Queues
from quire.engine.sequence import Sequence
from quire.kv.prefix import PrefixCache


class Preemption:
    """Takes back from a plan, and from the running, what is cheapest to bring back."""

    def __init__(
        self,
        queues: Queues,
        cache: PrefixCache,
        prefixes: Prefixes,
        slots: AdapterSlots | NoSlots = NO_SLOTS,
    ) -> None:
        self.queues = queues
        self.slots = slots
        self.cache = cache
        self.prefixes = prefixes

    def make_room(self, sequence: Sequence, count: int, schedule: Schedule) -> bool:
        """Preempt until `count` more tokens fit; False if the sequence itself had to go."""
        assert sequence.table is not None
        if sequence.table.room >= count:
            return True
        while sequence.table.blocks_needed(count) > self.cache.allocator.num_available:
            victim = self._cheapest_to_restore(sequence)
            if victim is None:
                return False  # the rest is being loaded, or copied to a lower tier: soon
            self._unschedule(victim, schedule)
            self.queues.preempt(victim)
            if victim is sequence:
                return False
        return True

    def make_way(self, has_place: Callable[[Sequence], bool]) -> None:
        """Background sequences give up their places for the first that waits, if it is not one.

        This comes before anything is planned: no other sequence shares what a step that is given
        up would have computed.
        """
        if not self.queues.waiting.has_foreground:
            return
        background = [each for each in self.queues.running if each.request.is_background]
        first = self.slots.first(self.queues) if background else None
        if first is None or first.request.is_background:
            return
        while background and not has_place(first):
            victim = min(background, key=self._restore_cost)
            background.remove(victim)
            self.queues.preempt(victim)

    def _cheapest_to_restore(self, sequence: Sequence) -> Sequence | None:
        """Among those that arrived after `sequence`, or itself: the fewest tokens to compute again.

        The first to arrive is never given up, so it always gets on and every request ends.
        """
        order, running = self.queues.waiting.order, self.queues.running
        mine = order(sequence)
        first = min(running, key=order)
        candidates = [s for s in running if order(s) >= mine and s is not first]
        return min(candidates, key=self._restore_cost, default=None)

    def _restore_cost(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Tokens that are lost with it: what others hold too stays in the cache. Those of
        background sequences cost less than any others."""
        assert sequence.table is not None
        counts = self.cache.allocator.ref_counts
        shared = min(
            table.first + sum(counts[block] > 1 for block in table.ids.tolist())
            for table in sequence.table.groups
        )
        lost = sequence.num_computed - shared * self.cache.block_size
        return not sequence.request.is_background, max(lost, 0), -sequence.request.number

    def _unschedule(self, sequence: Sequence, schedule: Schedule) -> None:
        for chunk in schedule.chunks:
            if chunk.sequence is sequence:
                self.prefixes.withdraw(sequence, chunk.num_published)
                sequence.num_drawn -= chunk.draw.count > 0
                schedule.chunks.remove(chunk)
                schedule.num_tokens -= chunk.count
                return
