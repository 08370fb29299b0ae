"""An adapter that waits takes the slot of one that runs, if else it would end after all others.

That is known when no requests have come for a while. What is left to do, shared out evenly over
the slots, takes some number of steps at the least. An adapter that has as many of its own to do may
wait no longer: at the end it would run while other slots are empty. The adapter that has the fewest
left gives way.

    3 adapters of 8 steps, 2 slots     a a a a a a a a c c c c c c c c     16 steps
                                       b b b b b b b b
                                       a a a a a a a a b b b b             12 steps
                                       b b b b c c c c c c c c

Its sequences are preempted. What they have computed stays in the cache, so that hardly a token is
computed twice; where there is no room for both, no slot is exchanged. How many steps are left is
known by `max_tokens`, which is a bound: an answer may end before it. So that none waits for ever,
an adapter gives way once for the same first request.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from quire.engine.adapters.adapter import Adapter
from quire.engine.adapters.no_slots import NoSlots
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.schedule.queues import Queues
from quire.engine.sequence import Sequence, Status
from quire.kv.prefix import PrefixCache

QUIET_STEPS = 128  # since the last request for any adapter
STEPS_BETWEEN = 8  # two looks at who waits; each leads to one exchange at most
LEAST_GAIN = 64  # steps that the one has left beyond those of the other; a load costs less than one


@dataclass
class Work:
    """What an adapter's sequences have to do."""

    steps_left: int = 0
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    is_loading: bool = False  # blocks of some are being filled


class SlotExchange:
    """Looks at all sequences before a step is planned."""

    def __init__(
        self, slots: AdapterSlots | NoSlots, queues: Queues, cache: PrefixCache, most_ahead: int
    ) -> None:
        """`most_ahead`: tokens of one sequence that are planned and not committed, at most."""
        self.quiet_steps = QUIET_STEPS
        self.steps_between = STEPS_BETWEEN
        self.least_gain = LEAST_GAIN
        self._slots = slots
        self._queues = queues
        self._cache = cache
        self._most_ahead = most_ahead
        self._num_requests = 0
        self._last_came = 0  # the step before which the last of them came

    def plan(self, step: int) -> None:
        """Exchange one slot, if that is called for."""
        slots = self._slots
        if isinstance(slots, NoSlots):
            return
        if slots.num_requests != self._num_requests:
            self._num_requests, self._last_came = slots.num_requests, step
        is_quiet = step >= self._last_came + self.quiet_steps
        if not slots.refused or not is_quiet or step % self.steps_between:
            return
        work = self._work()
        awaited = self._most_awaited(slots, work)
        if awaited is None or not self._has_room(work[awaited].waiting):
            return
        left = {a: w.steps_left for a, w in work.items() if self._gives_way(a, w, work[awaited])}
        if not left:
            return
        shortest = min(left, key=left.__getitem__)
        for sequence in work[shortest].running:
            self._queues.preempt(sequence)
        slots.exchange(shortest, awaited)

    def _work(self) -> dict[Adapter, Work]:
        queues = self._queues
        work: defaultdict[Adapter, Work] = defaultdict(Work)
        for sequence in (*queues.running, *queues.loading, *queues.waiting):
            if (adapter := sequence.request.adapter) is None:
                continue
            each, left = work[adapter], sequence.request.max_tokens - sequence.num_output
            each.steps_left = max(each.steps_left, left)
            if sequence.status is Status.RUNNING:
                each.running.append(sequence)
            elif sequence.status is Status.WAITING:
                each.waiting.append(sequence)
            else:
                each.is_loading = True
        return work

    def _most_awaited(self, slots: AdapterSlots, work: dict[Adapter, Work]) -> Adapter | None:
        """That with the most steps left of those that wait, if it has its share of all or more."""
        waiting = [a for a in slots.refused if a in work and a.slot is None and a.is_in_host]
        longest = max(waiting, key=lambda adapter: work[adapter].steps_left, default=None)
        total = sum(each.steps_left for each in work.values())
        if longest is None or work[longest].steps_left * slots.count < total:
            return None
        return longest

    def _has_room(self, waiting: list[Sequence]) -> bool:
        """Whether these can have blocks beside all that run now."""
        cache = self._cache
        counts = (cache.blocks_needed([], each.num_tokens, self._most_ahead) for each in waiting)
        spare = len(self._queues.running) * cache.num_groups
        return cache.enabled and sum(counts) + spare <= cache.allocator.num_available

    def _gives_way(self, adapter: Adapter, work: Work, awaited: Work) -> bool:
        """Whether its slot may be taken, so far as it and its sequences are concerned."""
        queues = self._queues
        if not work.running or work.is_loading or adapter.has_given_way:
            return False
        if work.steps_left + self.least_gain > awaited.steps_left:
            return False
        if any(sequence.request.streaming for sequence in work.running):
            return False  # a client reads it as it grows
        if queues.num_admitted - len(work.running) + len(awaited.waiting) > queues.max_num_seqs:
            return False
        rank = queues.waiting.rank
        return min(map(rank, work.running)) >= min(map(rank, awaited.waiting))
