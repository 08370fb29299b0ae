"""A quota for each tenant, whichever policy keeps it."""

from __future__ import annotations

from collections import Counter

import pytest
from watched_policy import POLICIES, WatchedPolicy

from quire.kv.policy import LRUPolicy
from quire.kv.policy.learned import LEARN_EVERY

pytestmark = pytest.mark.parametrize("make", POLICIES)


def tenant_of(key: int) -> int:
    return key // 1000


def watched(make, capacity: int, share: float) -> WatchedPolicy:
    return WatchedPolicy(make(capacity, tenant_share=share), tenant_of)


def request(policy: WatchedPolicy, *keys: int) -> int:
    """Asks for these blocks and then offers them; how many were taken."""
    policy.use(keys)
    for at, key in enumerate(keys):
        if not policy.offer(key, keys[at - 1] if at else None):
            return at
    return len(keys)


def held_by(policy: WatchedPolicy) -> dict[int, int]:
    return dict(Counter(map(tenant_of, policy.parents)))


def test_one_that_floods_pushes_nobody_out(make):
    policy = watched(make, 10, 0.5)
    assert request(policy, 1001, 1002, 1003) == 3
    for number in range(200):
        request(policy, 2000 + 2 * number, 2001 + 2 * number)
    assert held_by(policy) == {1: 3, 2: 5}
    assert request(policy, 1001, 1002, 1003, 1004, 1005) == 5


def test_its_own_blocks_leave_tails_first(make):
    policy = watched(make, 100, 0.04)
    assert request(policy, 1, 2, 3, 4) == 4
    while not request(policy, 10):
        pass
    assert set(policy.parents) == {1, 2, 3, 10}


def test_without_a_quota_one_may_have_everything(make):
    policy = watched(make, 6, 1.0)
    assert request(policy, 1, 2, 3, 4, 5, 6) == 6
    while request(policy, 1001, 1002) < 2:
        pass
    assert held_by(policy) == {0: 4, 1: 2}


def test_a_full_tier_gives_up_what_is_worth_least_whosever_it_is(make):
    """Below its share, a tenant competes with all others as if there were no quotas."""
    policy = watched(make, 6, 0.5)
    for tenant in (1000, 2000):
        assert request(policy, tenant, tenant + 1, tenant + 2) == 3
    for _ in range(3):
        request(policy, 2000, 2001, 2002)
    while request(policy, 3000, 3001) < 2:
        pass
    assert held_by(policy) == {1: 1, 2: 3, 3: 2}


def test_where_its_blocks_are_pinned_the_new_one_is_refused(make):
    policy = watched(make, 8, 0.25)
    assert request(policy, 1) == request(policy, 2) == 1
    policy.pin(1)
    policy.pin(2)
    for _ in range(20):
        assert request(policy, 3) == 0
    assert request(policy, 1001, 1002) == 2
    policy.unpin(2)
    assert any(request(policy, 3) for _ in range(20))
    assert set(policy.parents) == {1, 3, 1001, 1002}


def test_a_share_that_holds_no_block_keeps_none(make):
    policy = watched(make, 3, 0.3)
    assert request(policy, 1) == 0 and not policy.parents


def test_room_for_itself_that_others_took_comes_back(make):
    """Blocks that were lost no longer count."""
    policy = watched(make, 8, 0.25)
    assert request(policy, 1, 2) == 2
    policy.remove(2)
    assert request(policy, 3) == 1
    policy.remove(1)
    policy.remove(3)
    assert request(policy, 4, 5) == 2 and held_by(policy) == {0: 2}


@pytest.mark.parametrize("times", [1, 2])
def test_blocks_of_two_tenants_that_were_asked_for_at_once(make, times):
    """No request asks so; but each still counts as its own tenant's when it goes."""
    policy = watched(make, 8, 0.25)
    policy.use([1, 1001, 2, 1002, 3])
    for key in (1, 1001, 2, 1002):
        assert policy.offer(key, None)
    for _ in range(times - 1):
        policy.use([1, 1001, 2, 1002, 3])
    for key in (1, 2):
        policy.remove(key)
    assert request(policy, 4, 5) == 2 and held_by(policy) == {0: 2, 1: 2}
    for key in (1001, 1002):
        policy.remove(key)
    assert request(policy, 1003, 1004) == 2 and held_by(policy) == {0: 2, 1: 2}


def test_what_a_restart_finds_beyond_a_share_leaves_least_recently_used_first(make):
    policy = watched(make, 10, 0.3)
    keys = [5, 1003, 4, 3, 1002, 2, 1001, 1]  # the least recently used first
    policy.restore(keys, [4, 1002, 3, 2, 1001, 1, 0, 0])
    assert set(policy.parents) == {1, 2, 3, 1001, 1002, 1003}
    assert policy.left == [5, 4]
    assert request(policy, 1, 2, 3) == 3


def test_after_a_restart_tenants_leave_in_the_order_of_their_use(make):
    """Not one tenant before the other, only because it came first."""
    count = 600
    policy = make(2 * count, tenant_share=0.6)
    left = []
    policy.on_evict = left.append
    keys = [1000 * (1 + at % 2) + at // 2 for at in range(2 * count)]
    policy.restore(keys, [0] * len(keys), [tenant_of(key) for key in keys])
    for number in range(300):
        assert policy.offer(5000 + number, None, 5)
    assert len(left) == 300
    counts = Counter(map(tenant_of, left))
    assert counts[1] > 100 and counts[2] > 100


def test_as_many_tenants_as_there_are_blocks(make):
    """Salts may come and go for ever: nothing stays of a tenant that holds nothing."""
    policy = WatchedPolicy(make(20, tenant_share=0.1), lambda key: key)
    taken = sum(request(policy, key) for key in range(3000))
    assert taken > 20 and len(policy.parents) == 20
    inside = policy.policy
    known = inside._heaps if isinstance(inside, LRUPolicy) else inside._tenants._queues
    assert len(known) < 20 + LEARN_EVERY[0] + 1


def test_a_disk_that_fails_makes_every_share_smaller(make):
    policy = make(8, tenant_share=0.5)
    left = []
    policy.on_evict = left.append
    for key in (1, 2, 3, 4):
        policy.use([key])
        assert policy.offer(key, None, "one")
    policy.capacity = 4
    while 5 not in policy:
        policy.use([5])
        policy.offer(5, None, "one")
    assert left == [1, 2, 3] and len(policy) == 2
