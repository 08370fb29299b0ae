"""Small fleets and traces for the simulator's tests."""

from __future__ import annotations

import random
from dataclasses import replace

from quire.models.checkpoints.dummy import SHAPES
from quire.models.hf_config import read_hf_config
from quire.simulate.costs import StepCosts
from quire.simulate.fleet import Fleet, Setup
from quire.simulate.machine import GPUS
from quire.simulate.trace import Trace

H200 = GPUS["h200"]
SMALL = read_hf_config(SHAPES["qwen3-0.6b"])


def costs(config=SMALL, **rates):
    return StepCosts(config, replace(H200, **rates))


def fleet(num_replicas=1, num_blocks=64, block_size=128, rates=None, **settings):
    setup = Setup(num_replicas, num_blocks, block_size, **settings)
    return Fleet(setup, costs(**(rates or {})))


def talks(num_talks=8, num_turns=4, seed=0, gap=2.0):
    """Conversations: each turn has all blocks of the one before, and one or two more."""
    r = random.Random(seed)
    turns = []
    for talk in range(num_talks):
        at, names = r.uniform(0, gap), []
        for _ in range(num_turns):
            names = [*names, *(f"{talk}/{len(names) + i}" for i in range(r.randint(1, 2)))]
            length = 512 * len(names) - r.randint(0, 500)
            turns.append((at, names, length, r.randint(1, 150)))
            at += r.uniform(0.2, 2) * gap
    trace = Trace()
    for turn in sorted(turns):
        trace.add(*turn)
    return trace


def one_by_one(blocks_of_requests, apart=60.0, num_out=1):
    """Requests so far apart that each is alone, one token longer than its blocks."""
    trace = Trace()
    for number, names in enumerate(blocks_of_requests):
        trace.add(number * apart, names, 512 * len(names) + 1, num_out)
    return trace


def hit_tokens(answered):
    return sum(sum(each.cached.values()) for each in answered)


def state(simulated):
    """All that a run leaves behind, to compare two of them."""
    return [
        (
            replica.answered,
            replica.runner.busy,
            replica.engine.commit.num_steps,
            replica.engine.commit.num_computed_tokens,
            replica.engine.commit.num_generated_tokens,
            replica.engine.scheduler.step_number,
            replica.engine.scheduler.queues.num_preemptions,
            replica.engine.scheduler.admission.hits.misses,
            replica.engine.scheduler.cache.allocator._cached,
            replica.clock.now,
        )
        for replica in simulated.replicas
    ]
