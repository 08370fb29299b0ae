"""Waiting sequences that begin: in the policy's order, behind whatever prefix is cached.

What a lower tier has of a prefix is loaded first, while others are computed. If nothing is, and a
cached block begins as the prompt goes on, that part of it is copied.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from quire.engine.adapters.no_slots import NO_SLOTS, NoSlots
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.hit_stats import HitStats
from quire.engine.schedule.no_tiers import NoTiers, TierLookup
from quire.engine.schedule.planner import ChunkPlanner
from quire.engine.schedule.prefixes import Prefixes
from quire.engine.schedule.queues import Queues
from quire.engine.schedule.tiering import Tiering
from quire.engine.sequence import Sequence, Status
from quire.kv.index import Node
from quire.kv.prefix import PrefixCache

MOST_PREFETCHED = 16  # of those that wait, the first


class Admission:
    """Gives waiting sequences blocks, and puts their first chunks into the plan."""

    def __init__(
        self,
        queues: Queues,
        cache: PrefixCache,
        prefixes: Prefixes,
        tiering: Tiering | NoTiers,
        planner: ChunkPlanner,
        most_ahead: int,
        slots: AdapterSlots | NoSlots = NO_SLOTS,
    ) -> None:
        """`most_ahead`: tokens of one sequence that are planned and not committed, at most."""
        self.queues = queues
        self.cache = cache
        self.prefixes = prefixes
        self.tiering = tiering
        self.planner = planner
        self.most_ahead = most_ahead
        self.slots = slots
        self.hits = HitStats(cache)

    def plan(self, schedule: Schedule, budget: int, only: Collection[Sequence] | None) -> None:
        """Fill the step up to `budget` tokens; with `only`, with these sequences."""
        queues, slots = self.queues, self.slots
        if not queues.waiting or schedule.num_tokens == budget:
            return  # before the policy looks at any sequence
        most = min(queues.max_num_seqs, budget)
        held = [sequence for sequence in queues.running if sequence.is_held]
        if queues.num_admitted >= most and not held:
            return
        prefilling = [c.sequence for c in schedule.chunks if not c.is_last]
        prefilling += queues.loading
        slots.begin_walk(queues)
        sources: list[int] = []  # of the copies planned here, held until the plan is done
        for sequence in self._order(held, schedule.number):
            if only is not None and sequence not in only:
                continue
            if not slots.admits(sequence):
                continue  # others need not wait for a slot with it
            left = budget - schedule.num_tokens
            if left == 0 or (queues.num_admitted >= most and not held):
                break
            if sequence.num_drawn or sequence.is_held:
                continue
            sequence.nodes = self.prefixes.match(sequence)
            cached = len(sequence.nodes) * self.cache.block_size
            if self.prefixes.is_being_computed(sequence, cached, prefilling):
                continue  # it will find more in the cache in a step or two
            if not self._find_room(sequence, held, most):
                break  # in the policy's order: none overtakes a sequence that waits for memory
            found = self._load(sequence, schedule)
            if found is not TierLookup.ASKED:
                slots.admitted(sequence)
            if found is TierLookup.LOADING:
                prefilling.append(sequence)
            if found is not TierLookup.NOTHING:
                continue
            sources += self.admit(sequence, schedule)
            chunk = self.planner.add(sequence, min(sequence.remaining, left), schedule)
            chunk.admitted = True
            if not chunk.is_last:
                prefilling.append(sequence)
        self.cache.allocator.release(sources)
        self.tiering.prefetch(islice(queues.waiting, MOST_PREFETCHED), self.prefixes)

    def has_place(self, sequence: Sequence, budget: int) -> bool:
        """Whether a waiting sequence could be admitted with what is free now."""
        most = min(self.queues.max_num_seqs, budget)
        sequence.nodes = self.prefixes.match(sequence)
        return self.queues.num_admitted < most and self._fits(sequence)

    def take_loaded(self) -> None:
        """What has been loaded can be computed from there on."""
        self.tiering.poll()
        for sequence, loaded in self.tiering.take_loaded():
            if loaded is None:
                self._wait_again(sequence)
                continue
            cached = len(sequence.nodes) * self.cache.block_size
            self._start(sequence, cached, loaded.places, loaded.num_blocks)

    def take_back_loads(self, step: int) -> None:
        """Loads begun since this step: the blocks in front of them may be its, not computed."""
        for sequence in self.tiering.begun_since(step):
            self.tiering.abandon(sequence)
            self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        """It has no blocks any more, and is admitted as if it were new."""
        sequence.status = Status.WAITING
        self.queues.waiting.add(sequence)
        self.queues.watch.taken_back(sequence)

    def admit(self, sequence: Sequence, schedule: Schedule) -> list[int]:
        """Give it what is cached; returns the blocks that are to be copied for it, if any are.

        They are held once more, for the caller to release when all is planned.
        """
        part, count = self._match_part(sequence, schedule)
        sources = part.blocks.copy() if part is not None else []
        self.cache.allocator.share(sources)
        self.queues.waiting.discard(sequence)
        sequence.table = self.cache.table_behind(sequence.nodes, part, count)
        self._start(sequence, sequence.table.length, [])
        return sources

    def _start(
        self, sequence: Sequence, cached: int, loaded: list[str], num_blocks: int = 0
    ) -> None:
        """It has its blocks, with `cached` tokens in them.

        `loaded`: the tiers of the last ones, of which `num_blocks` were filled from there.
        """
        sequence.num_computed = cached
        self.queues.run(sequence)
        is_new = sequence.request.num_cached_tokens is None
        self.hits.admitted(sequence, cached, loaded, num_blocks)
        if is_new:
            self.tiering.note_use(sequence)
        self.queues.watch.started(sequence, cached, loaded)

    def _order(self, held: list[Sequence], step: int) -> list[Sequence]:
        """By the policy, but first those that beams are held for, the first to arrive first.

        What is held goes on only when these have been computed; else all could wait for all.
        """
        waiting = self.queues.waiting
        order = waiting.in_order(step)
        if not held:
            return order
        stalled = {sequence.request for sequence in held}
        awaited = [sequence for sequence in waiting if sequence.request in stalled]
        return awaited + [sequence for sequence in order if sequence.request not in stalled]

    def _find_room(self, sequence: Sequence, held: list[Sequence], most: int) -> bool:
        """Whether it can be admitted, if need be in the place of beams that are held.

        Those are its own request's, which wait for it, or of requests that come after it.
        """
        order = self.queues.waiting.order
        while self.queues.num_admitted >= most or not self._fits(sequence):
            victim = max(held, key=order, default=None)
            if victim is None:
                return False
            if victim.request is not sequence.request and order(victim) < order(sequence):
                return False
            held.remove(victim)
            self.queues.preempt(victim)
        return True

    def _fits(self, sequence: Sequence, others: int = 0) -> bool:
        """Whether all its tokens can be computed now, with a block to spare for each runner and
        group.

        `others`: cached blocks that must stay meanwhile.
        """
        cache = self.cache
        needed = cache.blocks_needed(sequence.nodes, sequence.num_tokens, self.most_ahead)
        spare = len(self.queues.running) * cache.num_groups
        return needed + spare + others <= cache.allocator.num_available

    def _load(self, sequence: Sequence, schedule: Schedule) -> TierLookup:
        """Begin to load what the tiers have of its prefix, if they have any."""
        limit = self.prefixes.cacheable(sequence)
        found = self.tiering.begin(sequence, limit, schedule.number, schedule.copies)
        if found is TierLookup.LOADING:
            self.queues.waiting.discard(sequence)
            sequence.status = Status.LOADING
            self.queues.watch.loading(sequence, self.tiering.places(sequence))
        return found

    def _match_part(self, sequence: Sequence, schedule: Schedule) -> tuple[Node | None, int]:
        """Whose blocks are to be copied in part for it, and how many of their tokens; or none.

        What this step itself fills cannot be copied before it.
        """
        part = self.prefixes.match_part(sequence, schedule.published)
        if part is None:
            return None, 0
        holders = self.cache.allocator.ref_counts
        num_cached = sum(holders[source] == 0 for source in part[0].blocks)
        return part if self._fits(sequence, others=num_cached) else (None, 0)
