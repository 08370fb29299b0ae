"""Random calls in random order, each policy beside a slow model of what must hold."""

from __future__ import annotations

import random

import pytest
from effort import effort
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_traces import TRACES
from watched_policy import POLICIES, WatchedPolicy

from quire.kv.policy import LearnedPolicy

KEYS = range(24)
SHARES = [1.0, 0.7, 0.5, 0.3]
keys = st.sampled_from(KEYS)


def parent_of(key: int) -> int | None:
    """Three trees, in which each block has up to two children."""
    return None if key < 3 else (key - 3) // 2


def path_to(key: int) -> list[int]:
    up = parent_of(key)
    return [*([] if up is None else path_to(up)), key]


def tenant_of(key: int) -> int:
    """Each tree is a tenant's."""
    return path_to(key)[0]


def check_first_of_all_tenants(policy) -> None:
    """What a heap finds at once is what a look at each tenant finds."""
    if isinstance(policy, LearnedPolicy):
        rank = policy._model.rank
        firsts = [run for each in policy._tenants.all() if (run := each.first())]
        found = policy._tenants.first()
        lowest = min((rank[run.cell] for run in firsts), default=None)
        assert lowest == (None if found is None else rank[found.cell])


class Life(RuleBasedStateMachine):
    make = None

    @initialize(
        capacity=st.integers(1, 8),
        held=st.sets(keys, max_size=8),
        share=st.sampled_from(SHARES),
    )
    def start(self, capacity, held, share):
        self.policy = WatchedPolicy(self.make(capacity, tenant_share=share), tenant_of)
        held = sorted(held, reverse=True)[:capacity]  # children first
        if held:
            self.policy.restore(held, [parent_of(key) for key in held])

    @rule(key=keys)
    def use(self, key):
        self.policy.use(path_to(key))

    @rule(key=keys, other=keys)
    def use_at_once(self, key, other):
        """Which may be blocks of two tenants: no request asks so, but nothing breaks if one does"""
        self.policy.use(list(dict.fromkeys(path_to(key) + path_to(other))))

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
            check_first_of_all_tenants(self.policy.policy)


def life_of(policy):
    machine = type(f"LifeOf{policy.__name__}", (Life,), {"make": staticmethod(policy)})
    case = machine.TestCase
    case.settings = settings(max_examples=effort(40, 80), stateful_step_count=60, deadline=None)
    return case


TestLRU, TestLearned = map(life_of, POLICIES)


@pytest.mark.diagonal
@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("trace", ["agents", "scans", "bursts"])
def test_a_long_life(make, share, trace):
    """Long enough to learn and to forget, with pins and losses now and then."""
    lots = random.Random(trace)
    tenants = {}
    policy = WatchedPolicy(make(60, tenant_share=share), tenants.get)
    for request in TRACES[trace](1)[:900]:
        tenants.update(dict.fromkeys(request, tenants.get(request[0], request[0] % 5)))
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
        check_first_of_all_tenants(policy.policy)
    policy.check_all(list(policy.parents))
