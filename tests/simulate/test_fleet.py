"""Fleets: every request is answered once, the same again, and caches do what they are for."""

from __future__ import annotations

import pytest
from simulated import fleet, hit_tokens, one_by_one, state, talks

from quire.simulate.figures import figures
from quire.simulate.trace import Trace

ALL = {"host": 60, "ssd": 200, "remote": 1000}
QUICK = {"ssd_read": 5e11, "ssd_write": 5e11, "remote_read": 5e11, "remote_write": 5e11}


def run(trace, *args, **settings):
    simulated = fleet(*args, **settings)
    return simulated.run(trace.replay())


@pytest.mark.parametrize("settings", [{}, {"router": "random"}, ALL, ALL | {"policy": "lru"}])
def test_every_request_is_answered_once(settings):
    trace = talks(num_talks=12, gap=0.5)
    simulated = fleet(3, 60, rates=QUICK, **settings)
    answered = simulated.run(trace.replay())
    asked = sorted((each.at, each.num_in, each.num_out) for each in trace.arrivals)
    assert sorted((each.arrived, each.num_in, each.num_out) for each in answered) == asked
    for each in answered:
        assert each.arrived < each.first <= each.ended
        assert sum(each.cached.values()) < each.num_in
    found = figures(simulated, answered)
    computed = sum(replica.engine.commit.num_computed_tokens for replica in simulated.replicas)
    needed = sum(each.num_in + each.num_out - 1 for each in answered) - hit_tokens(answered)
    assert computed >= needed and (computed == needed or found["preemptions"])
    assert 0 < found["gpu_hours_of_prompts"] < found["gpu_hours"] < found["gpu_hours_there"]
    assert sum(found["hit_tokens"].values()) == hit_tokens(answered)
    for replica in simulated.replicas:
        assert replica.engine.scheduler.cache.allocator.num_in_use == _being_kept(replica)


def _being_kept(replica):
    """Blocks that are still on their way to a lower tier."""
    tiering = replica.engine.scheduler.tiering
    return len(set(tiering.copied_blocks()))


@pytest.mark.parametrize("settings", [{"router": "random"}, ALL])
def test_the_same_again_is_the_same(settings):
    trace = talks(gap=0.3)
    runs = [fleet(3, 40, rates=QUICK, **settings) for _ in range(2)]
    for each in runs:
        each.run(trace.replay(copies=2, seed=5))
    assert state(runs[0]) == state(runs[1])


def test_a_request_longer_than_the_pool_is_refused_and_the_others_are_not():
    trace = one_by_one([["a"], ["b"] * 40, ["c"]])
    simulated = fleet(1, 64)
    answered = simulated.run(trace.replay())
    assert [each.num_in for each in answered] == [513, 513] and simulated.num_refused == 1
    assert set(simulated.dispatch._loads.values()) == {0.0}


def test_no_requests_at_all():
    simulated = fleet(2)
    assert simulated.run([]) == []
    assert figures(simulated, [])["gpu_hours"] == 0


def test_a_talk_on_one_replica_is_found_on_its_device():
    answered = run(one_by_one([["a"], ["a", "b"], ["a", "b", "c"]]), 1, 64)
    assert [each.cached for each in answered] == [{}, {"device": 512}, {"device": 1024}]


def test_a_cached_prompt_is_answered_sooner():
    first, again = run(one_by_one([["a"] * 7] * 2), 1, 64)
    assert again.first - again.arrived < (first.first - first.arrived) / 2


@pytest.mark.parametrize("tier", ["host", "ssd", "remote"])
def test_what_the_device_cannot_hold_is_found_in_a_tier(tier):
    """Two prompts in turn, and a pool that holds one."""
    trace = one_by_one([[name, name * 2, name * 3] for name in "abababab"], apart=5.0)
    without = run(trace, 1, 16)
    answered = run(trace, 1, 16, rates=QUICK, **{tier: 100})
    assert all(sum(each.cached.values()) < 512 for each in without)
    for each in answered[-3:]:  # before, its speed was not known
        assert sum(each.cached.values()) == 1536 and each.cached[tier] >= 1024


def test_a_tier_that_is_slower_than_computing_is_tried_and_left_alone():
    trace = one_by_one([[name, name * 2, name * 3] for name in "abababab"], apart=5.0)
    slow = {"ssd_read": 1e8}
    answered = run(trace, 1, 16, rates=slow, ssd=100)
    assert any("ssd" in each.cached for each in answered)
    assert all("ssd" not in each.cached for each in answered[-3:])


@pytest.mark.parametrize("tier", [None, "host", "remote"])
def test_more_room_never_finds_less(tier):
    trace = one_by_one([[f"{n % 7}", f"{n % 7}b", f"{n % 7}c"] for n in range(30)])
    found = []
    for room in (14, 28, 56, 112):
        tiers = {} if tier is None else {tier: room}
        num_blocks = room + 8 if tier is None else 16
        found.append(hit_tokens(run(trace, 1, num_blocks, rates=QUICK, policy="lru", **tiers)))
    assert found == sorted(found) and found[-1] > found[0]


def test_the_policy_keeps_talks_where_lru_keeps_what_never_comes_back():
    """Three talks go on; between their turns come prompts that are not asked for again."""
    requests = []
    for turn in range(20):
        requests += [[f"talk {n}", f"talk {n} b", f"talk {n} c"] for n in range(3)]
        requests += [[f"once {turn} {n}", f"{turn} {n} b", f"{turn} {n} c"] for n in range(12)]
    trace = one_by_one(requests)
    found = {
        policy: hit_tokens(run(trace, 1, 16, block_size=128, host=60, policy=policy))
        for policy in ("lru", "policy")
    }
    assert found["policy"] > 2 * found["lru"]


def test_routing_by_prefix_finds_what_random_routing_misses():
    trace = talks(num_talks=16, num_turns=5, gap=10.0)
    found = {
        router: hit_tokens(run(trace, 8, 200, router=router)) for router in ("random", "prefix")
    }
    assert found["prefix"] > 2 * found["random"]


def test_a_remote_store_is_one_for_all():
    """Whichever replica a turn goes to, the turn before is in the store."""
    trace = talks(num_talks=6, num_turns=5, gap=30.0)
    alone = run(trace, 8, 200, router="random")
    shared = run(trace, 8, 200, router="random", rates=QUICK, remote=2000)
    assert hit_tokens(shared) > 2 * hit_tokens(alone)
    assert any("remote" in each.cached for each in shared)


def test_nobody_is_overloaded_for_the_sake_of_a_prefix():
    """All want the same first block, all at once: they do not all go where it is."""
    trace = Trace()
    for number in range(40):
        trace.add(0.0, ["common", f"{number}", f"{number} b"], 1500, 20)
    answered = run(trace, 4, 400)
    shares = [sum(each.replica == number for each in answered) for number in range(4)]
    assert min(shares) > 5
