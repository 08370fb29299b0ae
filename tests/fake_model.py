"""A model without arithmetic: its KV is the tokens themselves, read and written through the pages.

The next token is a hash of the whole context as it is found in the pool, so a wrong block, a lost
copy or a stale key changes every token after it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from patience import PATIENCE_S

from quire.engine.engine import Engine
from quire.engine.model_facts import ModelFacts, Observed
from quire.engine.observe.block_owners import take_stock
from quire.engine.schedule.no_tiers import NO_TIERS
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.schedule.tiering import Tiering
from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.policy import LRUPolicy
from quire.kv.prefix import PrefixCache
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory
from quire.params import SamplingParams
from quire.runner.plan import StepPlan, StepResult
from quire.runner.sampling.sampler import Logprobs

VOCAB = 50
POISON = -7
OVERLAP = [False]  # whether engines overlap their steps, where a test does not say


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


def expected(prompt, max_tokens, eos=()):
    """What a greedy request must give, whatever happens around it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
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
        self.pool = np.full((cache.allocator.num_blocks, cache.block_size), POISON, dtype=np.int32)
        self.images = ImagePool(torch.from_numpy(self.pool).view(torch.uint8))
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
            ids = chunk.sequence.table.ids
            if count and int(ids[at]) in targets:
                there = self.pool[ids[at], :count]
                known = chunk.sequence.tokens.ids[at * self.block_size : chunk.start]
                insist((there[: len(known)] == known).all(), "something else was copied")
                self.parts_copied += chunk.admitted

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
        at = 0
        [tables] = plan.tables
        for row, start, count in zip(tables.block_tables, plan.starts, plan.counts, strict=True):
            for position in range(start, start + count):
                block, offset = int(row[position // self.block_size]), position % self.block_size
                insist((block, offset) not in written, "two sequences write one slot")
                known = self._keyed.get(block)
                is_found = known is not None and self.cache.index._by_block.get(block) is known
                insist(not is_found, "a block that others can find was written")
                written.add((block, offset))
                self.pool[block, offset] = plan.token_ids[at]
                at += 1

    def _draw(self, plan, masks):
        ends = np.cumsum(plan.counts)
        tokens, logprobs = [], []
        allowed = {} if masks is None else allowed_tokens(masks)
        for place, row in enumerate(plan.sample_rows.tolist()):
            sample = plan.samples[place]
            sequence = int(np.searchsorted(ends, row, side="right"))
            unseen = int(ends[sequence]) - 1 - row  # drafts behind this row
            context = self.context(plan, sequence, unseen)
            insist(POISON not in context, "a slot nobody wrote was read")
            sampled = not sample.params.is_greedy
            choices = allowed.get(place)
            tokens.append(next_token(context, sample.seed + sample.position, sampled, choices))
            logprobs.append(likeliest(context, tokens[-1], sample.num_best))
        return StepResult(tokens, logprobs, [])

    def context(self, plan, sequence, unseen=0):
        length = int(plan.starts[sequence] + plan.counts[sequence]) - unseen
        blocks = plan.tables[0].block_tables[sequence, : -(-length // self.block_size)]
        return self.pool[blocks].reshape(-1)[:length]

    def after_step(self):
        """Poison what is free, and remember what may be found."""
        allocator = self.cache.allocator
        free = set(allocator._free) - {source for source, _ in self.planned_copies()}
        self._keyed = dict(self.cache.index._by_block)
        self.pool[list(free)] = POISON


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
):
    """With `host_slots`, an engine with tiers: so many images are kept in host memory."""
    overlap = OVERLAP[-1] if overlap is None else overlap
    cache = PrefixCache(num_blocks, block_size, caching)
    runner = runner_class(cache)
    tiering = NO_TIERS
    namespace = Namespace("fake", "int32", "int32", block_size, "1", "none")
    if host_slots is not None:
        memory = HostMemory(4 * block_size, host_slots + 8, pinned=False)
        host = HostTier(memory, LRUPolicy(host_slots, tenant_share))
        tiering = Tiering(KVStore(runner.images, namespace, host, tiers), cache)
    scheduler = Scheduler(cache, budget, max_seqs, policy, tiering)
    runner.planned_copies = lambda: scheduler._copies
    remember_plans(scheduler, runner)
    return Engine(
        scheduler,
        runner,
        ModelFacts(VOCAB, num_blocks * block_size, (0,), tokenizer),
        overlap=overlap,
        observed=Observed(namespace=namespace),
    )


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
        held += Counter(b for _, blocks in scheduler.tiering._puts for b in blocks)
        held += Counter(b for _, t in scheduler.tiering._abandoned for b in t.ids.tolist())
    assert allocator.ref_counts == [held[b] for b in range(total)]
    keyed = {b for b in range(total) if allocator.is_keyed(b)}
    assert keyed == set(index._by_block) and not keyed & set(allocator._free)
    stock = take_stock(scheduler)
    assert stock.holders.tolist() == allocator.ref_counts
    assert set(stock.cached.nonzero()[0].tolist()) == set(allocator._cached)
    for sequence in scheduler.running:
        assert sequence.table.length == sequence.num_computed
        is_ahead = sequence.num_computed == sequence.num_tokens and not engine._under_way
        assert sequence.is_held == is_ahead or engine._under_way
        assert len(sequence.table) == -(-sequence.num_computed // scheduler.cache.block_size)
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
        tiering.settle(PATIENCE_S)
        assert not tiering.loading and not tiering._plans
        assert not tiering._puts and not tiering._abandoned
    assert allocator.ref_counts == [0] * allocator.num_blocks
    assert allocator.num_in_use == 0
