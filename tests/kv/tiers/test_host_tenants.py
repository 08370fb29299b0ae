"""A tenant's share of host memory, whatever is held, and however many salts it takes."""

from __future__ import annotations

from collections import Counter

import pytest
from block_images import keys
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tenant_blocks import blocks_of

from quire.kv.image import BlockName
from quire.kv.keys import tenant_tag
from quire.kv.policy import LearnedPolicy, LRUPolicy, Policy
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory

PASSING = 6


def host_tier(capacity: int, share: float, policy: type = LearnedPolicy) -> HostTier:
    kept: Policy[bytes] = policy(capacity, tenant_share=share)
    return HostTier(HostMemory(100, capacity + PASSING, pinned=False), kept)


def put(host: HostTier, names: list[BlockName]) -> None:
    """As a put does it: the slots are held until they are written to the tiers below."""
    host.use(keys(names))
    slots = host.take(len(names))
    host.keep(names[: len(slots)], slots)
    host.release(slots)


def test_a_tenant_that_floods_keeps_to_its_share() -> None:
    host = host_tier(12, 0.5)
    mine = blocks_of("b", 4)
    put(host, mine)
    for salt in range(50):
        put(host, blocks_of("a", 3, salt))  # a new salt each time is no way out
    assert host.contains(keys(mine)) == [True] * 4
    assert len(host) == 4 + 6
    assert len(host._free) == PASSING + 2


def test_what_is_held_is_not_given_up_and_the_quota_is_not_broken() -> None:
    host = host_tier(8, 0.25)
    held = blocks_of("a", 2)
    put(host, held)
    slots = host.hold(keys(held))
    for salt in range(1, 9):
        put(host, blocks_of("a", 1, salt))
    assert host.contains(keys(held)) == [True, True] and len(host) == 2
    assert len(host._free) == 6 + PASSING, "the slots of those that were refused are free again"
    host.release(slots)


class Life(RuleBasedStateMachine):
    """Three tenants with two salts each put, use, hold and let go."""

    policy: type

    @initialize(capacity=st.integers(1, 10), share=st.sampled_from([0.2, 0.5, 0.8, 1.0]))
    def start(self, capacity: int, share: float) -> None:
        self.host = host_tier(capacity, share, self.policy)
        self.most = int(share * capacity)
        self.held: list[list[int]] = []
        self.tenants = {
            name.key: tenant for tenant in "abc" for salt in (0, 1) for name in prompt(tenant, salt)
        }

    def count(self) -> Counter[str]:
        return Counter(self.tenants[key] for key in self.host._slots)

    @rule(tenant=st.sampled_from("abc"), salt=st.integers(0, 1), length=st.integers(1, 5))
    def put(self, tenant: str, salt: int, length: int) -> None:
        for name in prompt(tenant, salt)[:length]:
            before = set(self.host._slots)
            is_full = self.count()[tenant] >= self.most
            put(self.host, [name])
            lost = {self.tenants[key] for key in before - set(self.host._slots)}
            assert not is_full or lost <= {tenant}, "another had to make room for it"

    @rule(tenant=st.sampled_from("abc"), salt=st.integers(0, 1), length=st.integers(1, 5))
    def use(self, tenant: str, salt: int, length: int) -> None:
        self.host.use(keys(prompt(tenant, salt)[:length]))

    @rule(tenant=st.sampled_from("abc"), salt=st.integers(0, 1))
    def hold(self, tenant: str, salt: int) -> None:
        self.held.append(self.host.hold(keys(prompt(tenant, salt))))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 9))
    def let_go(self, number: int) -> None:
        self.host.release(self.held.pop(number % len(self.held)))

    @rule()
    def clear(self) -> None:
        self.host.clear()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "host"):
            assert all(count <= self.most for count in self.count().values())
            assert len(self.host) + len(self.host._free) == self.host.memory.num_slots


def prompt(tenant: str, salt: int) -> list[BlockName]:
    return blocks_of(tenant, 5, salt)


def life_with(policy: type) -> type:
    case = type(f"LifeWith{policy.__name__}", (Life,), {"policy": policy}).TestCase
    case.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
    return case


TestLearned, TestLRU = life_with(LearnedPolicy), life_with(LRUPolicy)


@pytest.mark.parametrize("tenant", ["", "a", "ä", "\ud800"])
def test_a_tag_is_short_and_nobodys_own(tenant: str) -> None:
    tag = tenant_tag(tenant)
    assert len(tag) == 16 and any(tag) and tag != tenant_tag(tenant + "x")
