"""Decides what each step computes: one token budget, shared by decode and chunked prefill.

    plan():  1. running sequences, decodes before prefills; when blocks run out, the sequence that
                is cheapest to bring back gives up its own
             2. waiting sequences, in the policy's order, behind whatever prefix is cached; what a
                lower tier has of it is loaded first, while others are computed. If nothing is, and
                a cached block begins as the prompt goes on, that part of it is copied

Counters and keys move when a step is planned, so that sequences of one step share what the step
itself computes, and the next step can be planned before this one is done. A step that fails is
taken back by `rollback`, which is the exact inverse; one that is done is made known by `commit`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from itertools import islice

from quire.engine.draws.next_draw import next_chunk
from quire.engine.draws.speculation import NO_SPECULATION, NoSpeculation, Speculation
from quire.engine.observe.lifecycle import Lifecycle
from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.schedule.misses import why_missed
from quire.engine.schedule.no_tiers import NO_TIERS, NoTiers, TierLookup
from quire.engine.schedule.prefixes import Prefixes
from quire.engine.schedule.tiering import Tiering
from quire.engine.schedule.waiting_queue import WaitingQueue
from quire.engine.sequence import Sequence, Status
from quire.kv.index import TokenIds
from quire.kv.prefix import PrefixCache
from quire.kv.table import BlockCopy

MOST_PREFETCHED = 16  # of those that wait, the first


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
    ) -> None:
        self.cache = cache
        self.clock = clock
        self.prefixes = Prefixes(cache)
        self.tiering = tiering
        self.speculation = speculation
        self.max_num_seqs = max_num_seqs
        self.max_budget = max_num_batched_tokens
        self.budget = max_num_batched_tokens  # lowered while memory is short
        self.waiting = WaitingQueue(policy, self.prefixes.cached_tokens)
        self.running: list[Sequence] = []
        self.step_number = 0
        self.num_preemptions = 0
        self.num_forks = 0
        self.num_shared_blocks = 0  # that forks took over from the sequence they left
        self.num_copied_blocks = 0  # because others held them, too
        self.num_query_tokens = 0  # prompt tokens that were looked up in the cache …
        self.num_hit_tokens = 0  # … and found there
        self.hits_by_tier: Counter[str] = Counter()  # those tokens, by where they were
        self.num_matched_blocks = 0  # taken over from the cache instead of allocated
        self.misses: Counter[str] = Counter()  # requests by why they were not found whole
        self.watch = Lifecycle(clock)
        self._copies: list[BlockCopy] = []  # planned, not made yet

    # --- queues -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        sequence.waiting_since = self.step_number
        self.waiting.add(sequence)

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` has the parent's tokens so far and shares their blocks."""
        if parent.table is not None and self._num_admitted < self.max_num_seqs:
            child.table = parent.table.fork()
            self.num_shared_blocks += len(child.table)
            child.num_computed = parent.num_computed
            child.nodes = list(parent.nodes)
            child.status = Status.RUNNING
            self.running.append(child)
        else:  # no place, or the parent was preempted: it finds the prompt in the cache later
            self.add(child)
        self.num_forks += 1
        self.watch.forked(parent, child)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, wherever it is, and give its blocks back at once."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.discard(sequence)
        self.tiering.abandon(sequence)
        self.speculation.forget(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self.watch.finished(sequence)

    def reset(self, sequences: list[Sequence]) -> None:
        """Begin again with these, all waiting, and nothing cached: for when a plan broke off."""
        self.tiering.reset()
        self.cache.reset()
        self.waiting = WaitingQueue(self.waiting.policy, self.prefixes.cached_tokens)
        self.running = []
        self._copies = []
        for sequence in sequences:
            sequence.table, sequence.num_computed, sequence.nodes = None, 0, []
            sequence.num_drawn = 0
            sequence.status = Status.WAITING
            self.waiting.add(sequence)
        self.watch.reset(sequences)

    @property
    def loading(self) -> Collection[Sequence]:
        return self.tiering.loading.keys()

    # --- planning -----------------------------------------------------------------------------

    def plan(self, only: Collection[Sequence] | None = None) -> Schedule:
        """Choose the next step; with `only`, among these sequences (to find one that breaks it)."""
        self.step_number += 1
        schedule = Schedule(self.step_number, copies=self._take_copies())
        self._take_loaded()
        self._plan_running(schedule, only)
        self._plan_waiting(schedule, only)
        return schedule

    def _plan_running(self, schedule: Schedule, only: Collection[Sequence] | None) -> None:
        drafts = self.speculation.propose(self.running)
        for sequence, count in self._running_order():
            budget = self.budget - schedule.num_tokens
            if budget == 0:
                break
            if sequence.status is not Status.RUNNING or (only is not None and sequence not in only):
                continue
            count = min(count, budget)
            if self._make_room(sequence, count, schedule):
                guesses = drafts.get(sequence) if drafts else None
                if guesses is not None:
                    guesses = self._affordable(sequence, guesses, budget)
                self._schedule(sequence, count, schedule, guesses)

    def _affordable(self, sequence: Sequence, drafts: TokenIds, budget: int) -> TokenIds | None:
        """As many guesses as there is room for without taking any from others."""
        assert sequence.table is not None
        spare = self.cache.allocator.num_available - len(self.running)
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

    def _plan_waiting(self, schedule: Schedule, only: Collection[Sequence] | None) -> None:
        if not self.waiting or schedule.num_tokens == self.budget:
            return  # before the policy looks at anyone
        held = [sequence for sequence in self.running if sequence.is_held]
        if self._num_admitted >= self._most_admitted and not held:
            return
        prefilling = [c.sequence for c in schedule.chunks if not c.is_last]
        prefilling += self.loading
        sources: list[int] = []  # of the copies planned here, held until the plan is done
        for sequence in self._waiting_order(held):
            budget = self.budget - schedule.num_tokens
            if budget == 0 or (self._num_admitted >= self._most_admitted and not held):
                break
            must_wait = sequence.num_drawn or sequence.is_held
            if must_wait or (only is not None and sequence not in only):
                continue
            sequence.nodes = self.prefixes.match(sequence)
            cached = len(sequence.nodes) * self.cache.block_size
            if self.prefixes.is_being_computed(sequence, cached, prefilling):
                continue  # it will find more in the cache in a step or two
            if not self._find_room(sequence, held):
                break  # in the policy's order: nobody overtakes who waits for memory
            prospect = self._load(sequence, schedule)
            if prospect is TierLookup.LOADING:
                prefilling.append(sequence)
            if prospect is not TierLookup.NOTHING:
                continue
            sources += self._admit(sequence, schedule)
            chunk = self._schedule(sequence, min(sequence.remaining, budget), schedule)
            chunk.admitted = True
            if not chunk.is_last:
                prefilling.append(sequence)
        self.cache.allocator.release(sources)
        self.tiering.prefetch(islice(self.waiting, MOST_PREFETCHED), self.prefixes)

    def _waiting_order(self, held: list[Sequence]) -> list[Sequence]:
        """By the policy, but first those that beams are held for, the first to arrive first.

        What is held goes on only when these have been computed; else all could wait for all.
        """
        order = self.waiting.in_order(self.step_number)
        if not held:
            return order
        stalled = {sequence.request for sequence in held}
        awaited = [sequence for sequence in self.waiting if sequence.request in stalled]
        return awaited + [sequence for sequence in order if sequence.request not in stalled]

    def _find_room(self, sequence: Sequence, held: list[Sequence]) -> bool:
        """Whether it can be admitted, if need be in the place of beams that are held.

        Those are its own request's, which wait for it, or of requests that come after it.
        """
        order = self.waiting.order
        while self._num_admitted >= self._most_admitted or not self._fits(sequence):
            victim = max(held, key=order, default=None)
            if victim is None:
                return False
            if victim.request is not sequence.request and order(victim) < order(sequence):
                return False
            held.remove(victim)
            self._preempt(victim)
        return True

    def _load(self, sequence: Sequence, schedule: Schedule) -> TierLookup:
        """Begin to load what the tiers have of its prefix, if they have any."""
        limit = self.prefixes.cacheable(sequence)
        prospect = self.tiering.begin(sequence, limit, self.step_number, schedule.copies)
        if prospect is TierLookup.LOADING:
            self.waiting.discard(sequence)
            sequence.status = Status.LOADING
            self.watch.loading(sequence, self.tiering.places(sequence))
        return prospect

    @property
    def _most_admitted(self) -> int:
        return min(self.max_num_seqs, self.budget)

    @property
    def _num_admitted(self) -> int:
        return len(self.running) + len(self.loading)

    def _take_loaded(self) -> None:
        """What has been loaded can be computed from there on."""
        self.tiering.poll()
        for sequence, places in self.tiering.take_loaded():
            self._start(sequence, len(sequence.nodes) * self.cache.block_size, places)

    def _schedule(
        self,
        sequence: Sequence,
        count: int,
        schedule: Schedule,
        drafts: TokenIds | None = None,
    ) -> Chunk:
        assert sequence.table is not None
        chunk = next_chunk(sequence, count, drafts)
        count, draw = chunk.count, chunk.draw
        if copies := sequence.table.append(count):
            schedule.copies += copies
            self.num_copied_blocks += len(copies)
            self.watch.copied(sequence)
        sequence.num_computed = computed = chunk.start + count
        if draw.count:
            sequence.num_drawn += 1
            sequence.awaits_draw = draw.holds_sequence
            if draw.is_awaited:
                schedule.is_awaited = True
        sequence.last_step = self.step_number
        if self.prefixes.publishable(sequence, computed):
            chunk.num_published = self.prefixes.publish(sequence, computed)
            schedule.published.update(sequence.nodes[-chunk.num_published :])
        schedule.chunks.append(chunk)
        schedule.num_tokens += count
        return chunk

    def rollback(self, schedule: Schedule, copied: bool) -> None:
        """Take a planned step back: it did not happen. `copied`: its block copies did."""
        if not copied:
            self._copies = schedule.copies + self._copies
        if schedule.chunks:
            self._take_back_loads(schedule.number)
        for chunk in reversed(schedule.chunks):
            sequence = chunk.sequence
            sequence.num_drawn -= chunk.draw.count > 0
            if sequence.status is not Status.RUNNING:
                continue
            self.prefixes.withdraw(sequence, chunk.num_published)
            if chunk.admitted:
                self._to_waiting(sequence)
                self.watch.taken_back(sequence)
            else:
                assert sequence.table is not None
                sequence.table.truncate(chunk.start)
                sequence.num_computed = chunk.start

    def _take_copies(self) -> list[BlockCopy]:
        """Copies that were planned and not made, as far as somebody still has what they fill."""
        wanted: list[BlockCopy] = []
        sources: set[int] = set()
        for source, target in reversed(self._copies):
            if self.cache.allocator.ref_counts[target] or target in sources:
                wanted.append((source, target))
                sources.add(source)
        self._copies = []
        return wanted[::-1]

    def _take_back_loads(self, step: int) -> None:
        """Loads begun since this step: the blocks in front of them may be its, not computed."""
        for sequence in self.tiering.begun_since(step):
            self.tiering.abandon(sequence)
            sequence.status = Status.WAITING
            self.waiting.add(sequence)
            self.watch.taken_back(sequence)

    def commit(self, chunk: Chunk) -> None:
        """The chunk is computed. What it drew is known now, and is the caller's to append."""
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

    # --- blocks -------------------------------------------------------------------------------

    def _fits(self, sequence: Sequence, others: int = 0) -> bool:
        """Whether all its tokens can be computed now, with a block to spare for each runner.

        `others`: cached blocks that must stay meanwhile.
        """
        block_size = self.cache.block_size
        allocator = self.cache.allocator
        held = sum(allocator.ref_counts[node.block] > 0 for node in sequence.nodes)
        needed = -(-sequence.num_tokens // block_size) - held
        spare = len(self.running)
        return needed + spare + others <= allocator.num_available

    def _admit(self, sequence: Sequence, schedule: Schedule) -> list[int]:
        """Give it what is cached; returns the block that is to be copied for it, if one is.

        That is held once more, for the caller to release when all is planned.
        """
        blocks = [node.block for node in sequence.nodes]
        cached = len(blocks) * self.cache.block_size
        source, count = self._match_part(sequence, schedule)
        self.cache.allocator.share(source)
        self.waiting.discard(sequence)
        sequence.table = self.cache.new_table()
        sequence.table.adopt(blocks + source, cached + count)
        self._start(sequence, cached + count, [])
        return source

    def _match_part(self, sequence: Sequence, schedule: Schedule) -> tuple[list[int], int]:
        """The block that is to be copied in part for it, and how many of its tokens; or none.

        What this step itself fills cannot be copied before it.
        """
        part = self.prefixes.match_part(sequence, schedule.published)
        if part is None:
            return [], 0
        source, count = part
        is_cached = self.cache.allocator.ref_counts[source] == 0
        return ([source], count) if self._fits(sequence, others=int(is_cached)) else ([], 0)

    def _start(self, sequence: Sequence, cached: int, loaded: list[str]) -> None:
        """It has its blocks, with `cached` tokens in them; `loaded`: the tiers of the last ones."""
        sequence.num_computed = cached
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        request = sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = cached
            request.cached_tokens_by_tier = self._by_tier(cached, loaded)
            self._note_miss(sequence, cached)
            self.num_query_tokens += sequence.prompt_len
            self.num_hit_tokens += cached
            self.hits_by_tier.update(request.cached_tokens_by_tier)
            self.tiering.note_use(sequence)
        self.num_matched_blocks += cached // self.cache.block_size - len(loaded)
        self.watch.started(sequence, cached, loaded)

    def _by_tier(self, cached: int, loaded: list[str]) -> dict[str, int]:
        block_size = self.cache.block_size
        by_tier = {place: count * block_size for place, count in Counter(loaded).items()}
        on_device = cached - len(loaded) * block_size
        return {"device": on_device, **by_tier} if on_device else by_tier

    def _note_miss(self, sequence: Sequence, cached: int) -> None:
        request = sequence.request
        miss = why_missed(sequence, cached, self.cache)
        if request.miss_reason is not None:
            self.misses["slower than computing"] += 1
        elif miss is not None:
            request.miss_reason = miss.says
            self.misses[miss.kind] += 1

    def _make_room(self, sequence: Sequence, count: int, schedule: Schedule) -> bool:
        """Preempt until `count` more tokens fit; False if the sequence itself had to go."""
        assert sequence.table is not None
        if sequence.table.room >= count:
            return True
        while sequence.table.blocks_needed(count) > self.cache.allocator.num_available:
            victim = self._cheapest_to_restore(sequence)
            if victim is None:
                return False  # the rest is being loaded, or copied to a lower tier: soon
            self._unschedule(victim, schedule)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _cheapest_to_restore(self, sequence: Sequence) -> Sequence | None:
        """Among those that arrived after `sequence`, or itself: the fewest tokens to compute again.

        The first to arrive is never given up, so it always gets on and every request ends.
        """
        order = self.waiting.order
        mine = order(sequence)
        first = min(self.running, key=order)
        candidates = [s for s in self.running if order(s) >= mine and s is not first]
        return min(candidates, key=self._restore_cost, default=None)

    def _restore_cost(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens that are lost with it: what others hold too stays in the cache."""
        assert sequence.table is not None
        counts = self.cache.allocator.ref_counts
        shared = sum(counts[block] > 1 for block in sequence.table.ids.tolist())
        lost = sequence.num_computed - shared * self.cache.block_size
        return max(lost, 0), -sequence.request.number

    def _unschedule(self, sequence: Sequence, schedule: Schedule) -> None:
        for chunk in schedule.chunks:
            if chunk.sequence is sequence:
                self.prefixes.withdraw(sequence, chunk.num_published)
                sequence.num_drawn -= chunk.draw.count > 0
                schedule.chunks.remove(chunk)
                schedule.num_tokens -= chunk.count
                return

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._to_waiting(sequence)
        self.watch.preempted(sequence)

    def preempt_youngest(self) -> bool:
        """Give up one running sequence, if it is not the only one; for when memory is short."""
        if len(self.running) < 2:
            return False
        self._preempt(max(self.running, key=self.waiting.order))
        return True

    def _to_waiting(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        self.waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self.watch.releasing(sequence)
        sequence.table.truncate(0)
        sequence.table = None
        sequence.num_computed = 0
