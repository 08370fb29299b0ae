"""A model without arithmetic: its KV is the tokens themselves, read and written through the pages.

The next token is a hash of the whole context as it is found in the pool, so a wrong block, a lost
copy or a stale key changes every token after it. A model with windows also has a digest of all
tokens before it in each slot, since a token's KV is not the same behind others; and of all groups
what a token sees goes into the hash: the longest of it as tokens, so that the answer is that of a
model with one group, and what differs in another.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakSet

import numpy as np
import torch
from patience import PATIENCE_S

from quire.engine.adapters.catalog import AdapterCatalog
from quire.engine.adapters.no_slots import NO_SLOTS
from quire.engine.engine import Engine
from quire.engine.model_facts import ModelFacts, Observed
from quire.engine.observe.block_owners import take_stock
from quire.engine.schedule.grouped_tiering import tiering_for
from quire.engine.schedule.no_tiers import NO_TIERS
from quire.engine.schedule.scheduler import Scheduler
from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.policy import LRUPolicy
from quire.kv.prefix import PrefixCache
from quire.kv.room import STEPS_AHEAD, longest_sequence
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory
from quire.params import SamplingParams
from quire.runner.plan import StepPlan, StepResult
from quire.runner.sampling.sampler import Logprobs

VOCAB = 50
POISON = -7
TOKEN_BITS = 8
TOKEN_MASK = (1 << TOKEN_BITS) - 1
OVERLAP = [False]  # whether engines overlap their steps, where a test does not say
WINDOWS = [(None,)]  # of their models' KV groups, where a test does not say


def token_of(slot):
    """What is left of a slot's content without the digest."""
    return np.where(slot == POISON, POISON, slot & TOKEN_MASK)


def next_token(context, seed=0, sampled=False, choices=None):
    salt = seed & 0xFFFF if sampled else 0
    drawn = zlib.crc32(np.asarray(context, dtype=np.int32).tobytes(), salt)
    return drawn % VOCAB if choices is None else int(choices[drawn % len(choices)])


def logits_behind(context):
    """Of every token, by a hash of the context; some are far likelier than others."""
    return _logits_of(zlib.crc32(np.asarray(context, dtype=np.int32).tobytes()))


@lru_cache(maxsize=10_000)
def _logits_of(hashed):
    logits = 3 * np.random.default_rng(hashed).standard_normal(VOCAB)
    logits.setflags(write=False)
    return logits


def logprobs_behind(context):
    logits = logits_behind(context)
    return logits - np.log(np.exp(logits).sum())


def likeliest(context, token_id, count):
    """What a beam asks for: the `count` best, best first."""
    if not count:
        return None
    logprobs = logprobs_behind(context)
    best = np.argsort(-logprobs, kind="stable")[:count].tolist()
    return Logprobs(token_id, logprobs[token_id], 1, tuple(best), tuple(logprobs[best].tolist()))


def allowed_tokens(masks):
    """For each masked draw, the ids it may give."""
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    return {
        row: np.flatnonzero(of_row) for row, of_row in zip(masks.rows.tolist(), bits, strict=True)
    }


def seen(tokens):
    """Those that the next one depends on."""
    windows = WINDOWS[-1]
    return tokens if None in windows else tokens[-max(windows) :]


def expected(prompt, max_tokens, eos=()):
    """What a greedy request must give, whatever happens around it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(seen(tokens)))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeStep:
    plan: StepPlan
    runner: FakeRunner
    value: StepResult | None = None

    def draw(self, masks=None):
        self.runner.before_draw(masks)
        insist(self.value is None, "a step draws once")
        self.value = self.runner.drawn_by(self.plan, masks)

    def result(self):
        self.runner.before_result()
        insist(self.value is not None, "a step was finished before it had drawn")
        return self.value


class Broken(BaseException):
    """An engine did what it never may; no recovery from steps that fail may hide it."""


def insist(condition, what):
    if not condition:
        raise Broken(what)


class FakeRunner:
    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.block_size = cache.block_size
        self.windows = cache.windows
        self.pool = np.full((cache.allocator.num_blocks, cache.block_size), POISON, dtype=np.int32)
        sizes = [4 * cache.block_size] * cache.num_groups
        self.images = ImagePool(torch.from_numpy(self.pool).view(torch.uint8), sizes)
        self.planned_copies = list
        self.schedule = None  # the step that was planned last
        self.before_launch = lambda plan: None
        self.before_copy = lambda copies: None
        self.before_draw = lambda masks: None
        self.before_result = lambda: None
        self.steps = 0
        self.computed = 0
        self.parts_copied = 0  # for sequences that began with part of a cached block
        self.plans = []
        self._keyed = {}  # by block, its node after the last step
        self._drawn = np.empty(0, dtype=np.int32)

    def copy_blocks(self, copies):
        self.before_copy(copies)
        for source, target in copies:
            self.pool[target] = self.pool[source]
        self._check_copied({target for _, target in copies})

    def _check_copied(self, targets):
        """What was copied is what the sequences that write behind it have there."""
        for chunk in self.schedule.chunks if targets else ():
            at, count = divmod(chunk.start, self.block_size)
            for group, table in enumerate(chunk.sequence.table.groups):
                block = int(table.ids[at - table.first]) if count else -1
                if block in targets:
                    there = token_of(self.pool[block, :count])
                    known = chunk.sequence.tokens.ids[at * self.block_size : chunk.start]
                    insist((there[: len(known)] == known).all(), "something else was copied")
                    self.parts_copied += chunk.admitted and group == 0

    def free_memory(self):
        pass

    def check(self):
        pass

    def close(self):
        pass

    def launch(self, plan):
        self.steps += 1
        token_ids = plan.token_ids.copy()
        token_ids[plan.fed_rows] = self._drawn[plan.fed_from]
        plan = replace(plan, token_ids=token_ids)
        self.plans.append(plan)
        self._write(plan)
        self.before_launch(plan)
        self.computed += plan.num_tokens
        step = FakeStep(plan, self)
        if not plan.is_masked:
            step.draw()
        return step

    def drawn_by(self, plan, masks):
        result = self._draw(plan, masks)
        self._drawn = np.array(result.token_ids, dtype=np.int32)
        return result

    def _write(self, plan):
        written = set()
        for group, tables in enumerate(plan.tables):
            at = 0
            for sequence, count in enumerate(plan.counts.tolist()):
                row, first = self._row(tables, sequence)
                start = int(plan.starts[sequence])
                if self.windows[group] is not None:
                    slots = self._slots_seen(row, first, group, start, start)
                    insist(POISON not in slots, "a slot was read that was never written")
                for position in range(start, start + count):
                    block = int(row[position // self.block_size - first])
                    offset = position % self.block_size
                    insist((block, offset) not in written, "two sequences write one slot")
                    known = self._keyed.get(block)
                    is_found = known is not None and self.cache.index._by_block.get(block) is known
                    # A window that has left its node may come back to it in the same block.
                    is_new = self.windows[group] is not None and known in self.schedule.published
                    insist(not is_found or is_new, "a block that others can find was written")
                    written.add((block, offset))
                    slot = self._stored(plan, sequence, at)
                    if self.windows != (None,):
                        slot = self._kv(slot, group, self._slot(row, first, position - 1))
                    self.pool[block, offset] = slot
                    at += 1

    def _stored(self, plan, sequence, at):
        """The KV of the token in a row of the step."""
        return plan.token_ids[at]

    def _row(self, tables, sequence):
        """Its block ids, and the place of the first of them."""
        first = 0 if tables.firsts is None else int(tables.firsts[sequence])
        return tables.block_tables[sequence], first

    def _slot(self, row, first, position):
        """What is there; nothing where the window has passed it."""
        place, offset = divmod(position, self.block_size)
        return 0 if position < 0 or place < first else int(self.pool[row[place - first], offset])

    def _kv(self, token_id, group, before):
        """The token, with a digest of all tokens up to here, and of the group.

        A window of one sees nothing before, so there the digest is of the token alone.
        """
        behind = 0 if self.windows[group] == 1 else before >> TOKEN_BITS
        digest = zlib.crc32(bytes([int(token_id), group]), behind) & 0x3FFFFF
        return int(token_id) | digest << TOKEN_BITS

    def _draw(self, plan, masks):
        ends = np.cumsum(plan.counts)
        tokens, logprobs = [], []
        allowed = {} if masks is None else allowed_tokens(masks)
        for place, row in enumerate(plan.sample_rows.tolist()):
            sample = plan.samples[place]
            sequence = int(np.searchsorted(ends, row, side="right"))
            unseen = int(ends[sequence]) - 1 - row  # drafts behind this row
            context = self.context(plan, sequence, unseen)
            insist(POISON not in context, "a slot was read that was never written")
            sampled = not sample.params.is_greedy
            choices = allowed.get(place)
            tokens.append(next_token(context, sample.seed + sample.position, sampled, choices))
            logprobs.append(likeliest(context, tokens[-1], sample.num_best))
        return StepResult(tokens, logprobs, [])

    def context(self, plan, sequence, unseen=0):
        """The tokens that the next one sees, as far as any group does; all groups agree on them."""
        length = int(plan.starts[sequence] + plan.counts[sequence]) - unseen
        if self.windows == (None,):
            row, _ = self._row(plan.tables[0], sequence)
            return self.pool[row[: -(-length // self.block_size)]].reshape(-1)[:length]
        found = [self._visible(plan, sequence, group, length) for group in range(len(plan.tables))]
        longest = max(found, key=len)
        for of_group in found:
            if (of_group != longest[len(longest) - len(of_group) :]).any():
                return np.concatenate([longest, of_group])  # and the next token is another one
        return longest

    def _visible(self, plan, sequence, group, length):
        """The tokens that one group shows, each behind its right prefix."""
        row, first = self._row(plan.tables[group], sequence)
        slots = self._slots_seen(row, first, group, length - 1, length)
        return np.array([token_of(slot) for slot in slots], dtype=np.int32)

    def _slots_seen(self, row, first, group, position, end):
        """Before `end`, those that a token at a position sees in one group."""
        window = self.windows[group]
        start = 0 if window is None else max(0, position - window + 1)
        insist(start // self.block_size >= first or start == end, "what is seen was given back")
        slots = [self._slot(row, first, position) for position in range(start, end)]
        for at in range(1, len(slots)):
            right = self._kv(slots[at] & TOKEN_MASK, group, slots[at - 1])
            insist(POISON in slots or slots[at] == right, "a slot of another prefix was read")
        return slots

    def after_step(self):
        """Poison what is free, and remember what may be found."""
        allocator = self.cache.allocator
        free = set(allocator._free) - {source for source, _ in self.planned_copies()}
        self._keyed = dict(self.cache.index._by_block)
        self.pool[list(free)] = POISON


OPEN: WeakSet[Engine] = WeakSet()  # engines that are not closed yet


class OpenEngine(Engine):
    def close(self):
        OPEN.discard(self)
        super().close()


def make_engine(
    num_blocks=16,
    block_size=4,
    budget=32,
    max_seqs=8,
    policy="fcfs",
    caching=True,
    overlap=None,
    host_slots=None,
    tiers=(),
    tenant_share=1.0,
    tokenizer=None,
    runner_class=FakeRunner,
    windows=None,
    max_len=None,
    adapter_slots=None,
    host_adapters=64,
):
    """With `host_slots`, an engine with tiers: so many images are kept in host memory.

    With several `windows`, `num_blocks` is for each of them. With `adapter_slots` it takes adapters
    (`runner_class=AdaptedRunner`).
    """
    overlap = OVERLAP[-1] if overlap is None else overlap
    windows = WINDOWS[-1] if windows is None else windows
    num_blocks *= len(windows)
    cache = PrefixCache(num_blocks, block_size, caching, windows)
    runner = runner_class(cache)
    tiering = NO_TIERS
    namespace = Namespace("fake", "int32", "int32", block_size, "1", "none")
    if host_slots is not None:
        memory = HostMemory(4 * block_size, host_slots + 8, pinned=False)
        host = HostTier(memory, LRUPolicy(host_slots, tenant_share))
        tiering = tiering_for(KVStore(runner.images, namespace, host, tiers), cache)
    adapters = None
    if adapter_slots is not None:
        adapters = AdapterCatalog(runner, adapter_slots, host_adapters)
    scheduler = Scheduler(
        *(cache, budget, max_seqs, policy, tiering),
        slots=NO_SLOTS if adapters is None else adapters.slots,
    )
    runner.planned_copies = lambda: scheduler._copies
    remember_plans(scheduler, runner)
    engine = OpenEngine(
        scheduler,
        runner,
        ModelFacts(VOCAB, longest(cache, budget, max_len), (0,), tokenizer),
        overlap=overlap,
        observed=Observed(namespace=namespace),
        adapters=adapters,
    )
    OPEN.add(engine)
    return engine


def longest(cache, budget, most=None):
    """How many tokens a sequence may have; where nothing is said, no more than with one group."""
    most = most or cache.num_blocks // cache.num_groups * cache.block_size
    ahead = STEPS_AHEAD * budget
    return longest_sequence(cache.num_blocks, cache.windows, cache.block_size, ahead, most)


def remember_plans(scheduler, runner):
    plan = scheduler.plan

    def planned(only=None):
        runner.schedule = plan(only)
        return runner.schedule

    scheduler.plan = planned


def greedy(max_tokens, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **more})


def step(engine):
    outputs = engine.step()
    check_invariants(engine)
    engine.runner.after_step()
    return outputs


def run(engine, limit=5000):
    outputs = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            break
        for output in step(engine):
            outputs[output.request_id] = output
    assert not engine.has_unfinished_requests(), "no end in sight"
    check_idle(engine)
    return outputs


def check_invariants(engine):
    scheduler = engine.scheduler
    allocator, index = scheduler.cache.allocator, scheduler.cache.index
    total = allocator.num_blocks
    assert allocator.num_free + allocator.num_cached + allocator.num_in_use == total
    assert len(set(allocator._free)) == allocator.num_free
    assert allocator.num_in_use == sum(count > 0 for count in allocator.ref_counts)
    held = Counter(b for s in scheduler.running for b in s.table.ids.tolist())
    if scheduler.tiering is not NO_TIERS:
        held += Counter(b for s in scheduler.loading for b in s.table.ids.tolist())
        held += Counter(scheduler.tiering.copied_blocks())
    assert allocator.ref_counts == [held[b] for b in range(total)]
    keyed = {b for b in range(total) if allocator.is_keyed(b)}
    assert keyed == set(index._by_block) and not keyed & set(allocator._free)
    stock = take_stock(scheduler)
    assert stock.holders.tolist() == allocator.ref_counts
    cached = {*allocator._cached, *allocator._evict_first}
    assert set(stock.cached.nonzero()[0].tolist()) == cached
    for sequence in scheduler.running:
        assert sequence.table.length == sequence.num_computed
        is_ahead = sequence.num_computed == sequence.num_tokens and not engine._under_way
        assert sequence.is_held == is_ahead or engine._under_way
        for table in sequence.table.groups:
            held = table.first + len(table)
            assert held == -(-sequence.num_computed // scheduler.cache.block_size)
    assert all(s.table is None and s.num_computed == 0 for s in scheduler.waiting)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    drawn = Counter(
        c.sequence for s in engine._under_way for c in s.schedule.chunks if c.draw.count
    )
    for sequence in [*scheduler.running, *scheduler.waiting]:
        assert sequence.num_drawn == drawn[sequence] <= 1


def check_idle(engine):
    allocator, tiering = engine.scheduler.cache.allocator, engine.scheduler.tiering
    if tiering is not NO_TIERS:
        tiering.wait_for_copies(PATIENCE_S)
        assert not tiering.loading and not tiering._matches
        assert tiering.copied_blocks() == []
    assert allocator.ref_counts == [0] * allocator.num_blocks
    assert allocator.num_in_use == 0
