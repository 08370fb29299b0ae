"""Random calls in random order, each policy beside a slow model of what must hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_traces import TRACES
from watched_policy import POLICIES, WatchedPolicy

KEYS = range(24)
keys = st.sampled_from(KEYS)


def parent_of(key: int) -> int | None:
    """Two trees, in which each block has up to two children."""
    return None if key < 2 else (key - 2) // 2


def path_to(key: int) -> list[int]:
    up = parent_of(key)
    return [*([] if up is None else path_to(up)), key]


class Life(RuleBasedStateMachine):
    make = None

    @initialize(capacity=st.integers(1, 8), held=st.sets(keys, max_size=8))
    def start(self, capacity, held):
        self.policy = WatchedPolicy(self.make(capacity))
        held = sorted(held, reverse=True)[:capacity]  # children first
        if held:
            self.policy.restore(held, [parent_of(key) for key in held])

    @rule(key=keys)
    def use(self, key):
        self.policy.use(path_to(key))

    @rule(key=keys)
    def offer(self, key):
        self.policy.offer(key, parent_of(key))

    @rule(key=keys)
    def request(self, key):
        path = path_to(key)
        self.policy.use(path)
        for each in path:
            if not self.policy.offer(each, parent_of(each)):
                break

    @precondition(lambda self: self.policy.parents)
    @rule(data=st.data())
    def pin(self, data):
        self.policy.pin(data.draw(st.sampled_from(sorted(self.policy.parents))))

    @precondition(lambda self: self.policy.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.policy.unpin(data.draw(st.sampled_from(sorted(self.policy.pins))))

    @rule(key=keys)
    def remove(self, key):
        self.policy.remove(key)

    @invariant()
    def holds(self):
        if hasattr(self, "policy"):
            self.policy.check_all(KEYS)


def life_of(policy):
    machine = type(f"LifeOf{policy.__name__}", (Life,), {"make": staticmethod(policy)})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
    return case


TestLRU, TestLearned = map(life_of, POLICIES)


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("trace", ["agents", "scans", "bursts"])
def test_a_long_life(make, trace):
    """Long enough to learn and to forget, with pins and losses now and then."""
    lots = random.Random(trace)
    policy = WatchedPolicy(make(60))
    for request in TRACES[trace](1)[:900]:
        policy.use(request)
        parent = None
        for key in request:
            if not policy.offer(key, parent):
                break
            parent = key
        if lots.random() < 0.1 and policy.parents:
            policy.pin(lots.choice(list(policy.parents)))
        if lots.random() < 0.1 and policy.pins:
            policy.unpin(lots.choice(list(policy.pins)))
        if lots.random() < 0.02 and policy.parents:
            policy.remove(lots.choice(list(policy.parents)))
    policy.check_all(list(policy.parents))
