"""What a tier may rely on, whichever policy it has."""

from __future__ import annotations

import pytest
from watched_policy import POLICIES, WatchedPolicy

pytestmark = pytest.mark.parametrize("make", POLICIES)


def chain(policy, *keys):
    """A request that asks for these blocks and then offers them; how many were taken."""
    policy.use(keys)
    for at, key in enumerate(keys):
        if not policy.offer(key, keys[at - 1] if at else None):
            return at
    return len(keys)


def test_takes_all_while_there_is_room(make):
    policy = make(3)
    assert policy.capacity == 3 and len(policy) == 0 and 1 not in policy
    assert chain(policy, 1, 2, 3) == 3
    assert len(policy) == 3 and all(key in policy for key in (1, 2, 3))


def test_keys_are_anything_that_has_a_hash(make):
    policy = make(2)
    assert policy.offer(b"one", None) and policy.offer(("two",), b"one")
    assert b"one" in policy and ("two",) in policy and "two" not in policy


def test_a_parent_that_nobody_knows_makes_a_root(make):
    """It may be in another tier, or on its way."""
    policy = WatchedPolicy(make(3))
    assert policy.offer(2, 1) and policy.offer(3, 2)
    assert policy.offer(1, None)
    assert policy.parents == {2: None, 3: 2, 1: None}


def test_behind_one_that_had_to_leave_nothing_is_taken(make):
    policy = WatchedPolicy(make(1))
    chain(policy, 1)
    while not chain(policy, 2):
        pass
    policy.remove(2)
    assert not policy.offer(11, 1), "there is room, but no prompt would find it"
    assert policy.offer(1, None)


def test_behind_one_that_was_turned_away_nothing_is_taken(make):
    policy = WatchedPolicy(make(2))
    chain(policy, 1, 2)
    policy.pin(2)
    assert not policy.offer(3, None)
    policy.remove(2)
    assert not policy.offer(31, 3)


def test_an_offer_of_a_resident_block_changes_nothing(make):
    policy = WatchedPolicy(make(2))
    assert chain(policy, 1, 2) == 2
    assert policy.offer(1, None) and policy.offer(2, 1)
    assert set(policy.parents) == {1, 2}


def test_one_leaves_for_one_that_comes(make):
    policy = WatchedPolicy(make(2))
    chain(policy, 1)
    chain(policy, 2)
    for _ in range(20):  # asked for again and again, it is worth more than those
        if chain(policy, 3):
            break
    assert (1 in policy.policy) != (2 in policy.policy) and 3 in policy.policy


def test_parents_of_resident_blocks_stay(make):
    policy = WatchedPolicy(make(3))
    chain(policy, 1, 2, 3)
    for _ in range(20):
        chain(policy, 10, 11, 12)
    assert len(policy.policy) == 3  # the watch has seen that no parent left before its child


def test_a_chain_does_not_eat_its_own_head(make):
    policy = WatchedPolicy(make(3))
    assert chain(policy, 1, 2, 3, 4, 5) == 3
    assert set(policy.parents) == {1, 2, 3}


def test_pinned_blocks_stay_however_often_they_were_pinned(make):
    policy = WatchedPolicy(make(1))
    chain(policy, 1)
    policy.pin(1)
    policy.pin(1)
    policy.unpin(1)
    for _ in range(20):
        assert chain(policy, 2) == 0
    policy.unpin(1)
    assert any(chain(policy, 2) for _ in range(20))


def test_what_is_let_go_can_leave(make):
    """A block that was passed over while it was held must be found when it no longer is."""
    policy = WatchedPolicy(make(3))
    chain(policy, 1, 2, 3)
    policy.pin(3)
    for _ in range(20):
        assert chain(policy, 7) == 0
    policy.unpin(3)
    assert any(chain(policy, 7) for _ in range(20))
    assert set(policy.parents) == {1, 2, 7}
    assert any(chain(policy, 7, 8) == 2 for _ in range(20))
    assert set(policy.parents) == {1, 7, 8}


def test_what_stands_behind_a_lost_block_stays(make):
    policy = WatchedPolicy(make(8))
    chain(policy, 1, 2, 3)
    chain(policy, 1, 2, 4)
    chain(policy, 1, 5)
    policy.pin(2)
    policy.remove(2)
    assert policy.parents == {1: None, 3: None, 4: None, 5: 1}
    policy.unpin(2)
    assert chain(policy, 1, 2, 4) == 3


def test_all_can_leave_after_the_middle_was_lost(make):
    policy = WatchedPolicy(make(3))
    chain(policy, 1, 2, 3)
    policy.remove(2)
    while chain(policy, 7, 8, 9) < 3:
        pass
    assert set(policy.parents) == {7, 8, 9}


def test_remove_of_what_is_not_there_is_nothing(make):
    policy = WatchedPolicy(make(2))
    chain(policy, 1)
    policy.use([1, 2, 3])
    policy.remove(2)
    policy.remove(99)
    assert set(policy.parents) == {1} and policy.left == []


def test_a_request_without_blocks(make):
    policy = WatchedPolicy(make(2))
    policy.use([])
    assert len(policy.policy) == 0


def test_what_is_remembered_of_the_past_is_bounded(make):
    capacity, length = 16, 100
    policy = make(capacity)
    for number in range(1500):
        policy.use(range(number * length, (number + 1) * length))
        policy.offer(number * length, None)
    assert len(policy) == capacity
    assert policy.num_ghosts < 100_000


def test_what_was_held_before_a_restart(make):
    policy = WatchedPolicy(make(4))
    policy.restore([3, 2, 5, 1], [2, 1, 99, 0])
    assert policy.parents == {3: 2, 2: 1, 5: None, 1: None}
    assert chain(policy, 1, 2, 3) == 3 and len(policy.parents) == 4
    while chain(policy, 6, 7, 8, 9) < 4:
        pass
    assert set(policy.parents) == {6, 7, 8, 9}, "those of before can leave as others can"


def test_an_answer_that_was_written_block_by_block_can_leave_after_a_restart(make):
    """Each of its blocks is newer than the one before it, and no request has asked for it since."""
    policy = make(4)
    left = []
    policy.on_evict = left.append
    policy.restore([9, 1, 2, 3], [8, 0, 1, 2], [None] * 4)
    for _ in range(20):
        chain(policy, 5, 6, 7, 8)
    assert left == [9, 3, 2, 1]


@pytest.mark.filterwarnings("error")
def test_without_room_nothing_is_learned_or_remembered(make):
    """As in host memory that blocks only pass through, on their way to a disk."""
    policy = make(0)
    for number in range(20):
        policy.use(range(100 * number, 100 * number + 100))
        assert not policy.offer(100 * number, None)
    assert len(policy) == policy.num_ghosts == 0
    policy.capacity = 2
    for _ in range(1000):
        assert chain(policy, 8, 9) == 2


def test_room_that_comes_and_goes(make):
    """A disk is opened, and another fails."""
    policy = make(2)
    policy.capacity = 0
    assert chain(policy, 1) == 0
    policy.capacity = 2
    assert chain(policy, 8, 9) == 2
    policy.remove(9)
    policy.capacity = 1
    policy.pin(8)
    assert chain(policy, 8, 7) == 1
    assert len(policy) == 1
