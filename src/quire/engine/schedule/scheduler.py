"""Decides what each step computes: one token budget, shared by decode and chunked prefill.

    plan():  1. sequences give way: those of an adapter to an adapter that waits (`SlotExchange`),
                background ones to the first that waits, if there is no place for it (`Preemption`)
             2. running sequences, decodes before prefills; when blocks run out, the sequence that
                is cheapest to bring back gives up its own (`Preemption`)
             3. waiting sequences, in the policy's order, behind whatever prefix is cached
                (`Admission`)

Counters and keys move when a step is planned (`ChunkPlanner`), so that sequences of one step share
what the step itself computes, and the next step can be planned before this one is done. A step that
fails is taken back by `rollback`, which is the exact inverse; one that is done is made known by
`commit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from quire.engine.adapters.exchange import SlotExchange
from quire.engine.adapters.no_slots import NO_SLOTS, NoSlots
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.draws.speculation import NO_SPECULATION, NoSpeculation, Speculation
from quire.engine.observe.lifecycle import Lifecycle
from quire.engine.schedule.admission import Admission
from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.schedule.no_tiers import NO_TIERS, NoTiers
from quire.engine.schedule.planner import ChunkPlanner
from quire.engine.schedule.preemption import Preemption
from quire.engine.schedule.prefixes import Prefixes
from quire.engine.schedule.queues import Queues
from quire.engine.schedule.tiering import Tiering
from quire.engine.schedule.waiting_queue import WaitingQueue
from quire.engine.sequence import Sequence, Status
from quire.kv.index import TokenIds
from quire.kv.prefix import PrefixCache
from quire.kv.room import STEPS_AHEAD
from quire.kv.table import BlockCopy

ANSWERED = ("stop", "length")  # why an answer ends that may go on in a later prompt


class Scheduler:
    """Owns the queues and every block; knows nothing of tensors."""

    def __init__(
        self,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: str = "fcfs",
        tiering: Tiering | NoTiers = NO_TIERS,
        speculation: Speculation | NoSpeculation = NO_SPECULATION,
        clock: Callable[[], float] = time.monotonic,
        slots: AdapterSlots | NoSlots = NO_SLOTS,
    ) -> None:
        self.cache = cache
        self.clock = clock
        self.tiering = tiering
        self.speculation = speculation
        self.slots = slots
        self.max_budget = max_num_batched_tokens
        self.budget = max_num_batched_tokens  # lowered while memory is short
        self.prefixes = Prefixes(cache)
        self.waiting = WaitingQueue(policy, self.prefixes.cached_tokens)
        self.queues = Queues(self.waiting, tiering, max_num_seqs, clock)
        self.running = self.queues.running
        self.planner = ChunkPlanner(self.queues, self.prefixes)
        self.preemption = Preemption(self.queues, cache, self.prefixes, slots)
        most_ahead = STEPS_AHEAD * max_num_batched_tokens
        self.admission = Admission(
            *(self.queues, cache, self.prefixes, tiering, self.planner, most_ahead, slots)
        )
        self.exchange = SlotExchange(slots, self.queues, cache, most_ahead)
        self.step_number = 0
        self.num_forks = 0
        self.num_shared_blocks = 0  # that forks took over from the sequence they left
        self._copies: list[BlockCopy] = []  # planned, not made yet

    # --- queues -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        sequence.waiting_since = self.step_number
        self.waiting.add(sequence)

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` has the parent's tokens so far and shares their blocks."""
        if parent.table is not None and self.queues.num_admitted < self.max_num_seqs:
            child.table = parent.table.fork()
            self.num_shared_blocks += len(child.table)
            child.num_computed = parent.num_computed
            child.nodes = list(parent.nodes)
            self.queues.run(child)
        else:  # no place, or the parent was preempted: it finds the prompt in the cache later
            self.add(child)
        self.num_forks += 1
        self.watch.forked(parent, child)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, wherever it is, and give its blocks back at once."""
        if reason in ANSWERED:
            self.tiering.offer_end(sequence)
        self.queues.remove(sequence)
        self.tiering.abandon(sequence)
        self.speculation.forget(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self.watch.finished(sequence)

    def reset(self, sequences: list[Sequence]) -> None:
        """Begin again with these, all waiting, and nothing cached: for when a plan broke off."""
        self.tiering.reset()
        self.cache.reset()
        self._copies = []
        self.queues.reset(sequences)

    @property
    def loading(self) -> Collection[Sequence]:
        return self.queues.loading

    @property
    def max_num_seqs(self) -> int:
        return self.queues.max_num_seqs

    @property
    def watch(self) -> Lifecycle:
        """What is told of everything that happens to a request."""
        return self.queues.watch

    @watch.setter
    def watch(self, watch: Lifecycle) -> None:
        self.queues.watch = watch

    # --- planning -----------------------------------------------------------------------------

    def plan(self, only: Collection[Sequence] | None = None) -> Schedule:
        """Choose the next step; with `only`, among these sequences (to find one that breaks it)."""
        self.step_number += 1
        schedule = Schedule(self.step_number, copies=self._take_copies())
        self.admission.take_loaded()
        if only is None:
            self.exchange.plan(self.step_number)
            self.preemption.make_way(partial(self.admission.has_place, budget=self.budget))
        self._plan_running(schedule, only)
        self.admission.plan(schedule, self.budget, only)
        return schedule

    def _plan_running(self, schedule: Schedule, only: Collection[Sequence] | None) -> None:
        drafts = self.speculation.propose(self.running)
        add, make_room = self.planner.add, self.preemption.make_room
        for sequence, count in self._running_order():
            budget = self.budget - schedule.num_tokens
            if budget == 0:
                break
            if sequence.status is not Status.RUNNING or (only is not None and sequence not in only):
                continue
            if count > budget:
                count = budget
            if make_room(sequence, count, schedule):
                guesses = drafts.get(sequence) if drafts else None
                if guesses is not None:
                    guesses = self._affordable(sequence, guesses, budget)
                add(sequence, count, schedule, guesses)

    def _affordable(self, sequence: Sequence, drafts: TokenIds, budget: int) -> TokenIds | None:
        """As many guesses as there is room for without taking any from others."""
        assert sequence.table is not None
        cache = self.cache
        spare = cache.allocator.num_available - len(self.running) * cache.num_groups
        count = min(len(drafts), budget - 1)
        while count > 0 and sequence.table.blocks_needed(1 + count) > max(spare, 0):
            count -= 1
        return drafts[:count] if count > 0 else None

    def _running_order(self) -> list[tuple[Sequence, int]]:
        """Those with work to do, decodes first, and how many tokens each has."""
        running = self.speculation.without_awaiting(self.running)
        work = [(sequence, sequence.remaining) for sequence in running]
        decodes = [each for each in work if each[1] == 1]
        if len(decodes) > self.budget:
            decodes.sort(key=lambda each: each[0].last_step)  # take turns
        if len(decodes) < len(work):
            decodes += [each for each in work if each[1] > 1]
        return decodes

    def _take_copies(self) -> list[BlockCopy]:
        """Copies that were planned and not made, as far as some table still has what they fill."""
        wanted: list[BlockCopy] = []
        sources: set[int] = set()
        for source, target in reversed(self._copies):
            if self.cache.allocator.ref_counts[target] or target in sources:
                wanted.append((source, target))
                sources.add(source)
        self._copies = []
        return wanted[::-1]

    # --- steps that are over --------------------------------------------------------------------

    def rollback(self, schedule: Schedule, copied: bool) -> None:
        """Take a planned step back: it did not happen. `copied`: its block copies did."""
        if not copied:
            self._copies = schedule.copies + self._copies
        if schedule.chunks:
            self.admission.take_back_loads(schedule.number)
        for chunk in reversed(schedule.chunks):
            sequence = chunk.sequence
            sequence.num_drawn -= chunk.draw.count > 0
            if sequence.status is not Status.RUNNING:
                continue
            self.prefixes.withdraw(sequence, chunk.num_published)
            if chunk.admitted:
                self.queues.to_waiting(sequence)
                self.watch.taken_back(sequence)
            else:
                assert sequence.table is not None
                sequence.table.truncate(chunk.start)
                sequence.num_computed = chunk.start

    def commit(self, chunk: Chunk) -> None:
        """The chunk is computed. What it drew is known now, and is the caller's to append.

        Windows give back what no later token sees. Here and not when a step is planned: it could
        fail, and its drafts may be wrong.
        """
        sequence = chunk.sequence
        if chunk.draw.count:
            sequence.num_drawn -= 1
        if sequence.status is not Status.RUNNING:
            return
        computed = min(chunk.start + chunk.count, sequence.num_computed)
        if self.prefixes.publishable(sequence, computed):
            self.prefixes.publish(sequence, computed)
        block_size = self.cache.block_size
        first, full = chunk.start // block_size, min(computed, sequence.tokens.count) // block_size
        if full > first:
            self.tiering.offer(sequence, first, full)
            if self.cache.has_windows:
                assert sequence.table is not None
                sequence.table.give_back(computed, sequence.prompt_len)
