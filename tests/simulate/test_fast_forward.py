"""Many steps in one go are the same as one by one, whatever comes between."""

from __future__ import annotations

import pytest
from simulated import fleet, state, talks

from quire.simulate.fast_forward import FastForward
from quire.simulate.trace import Trace

TIERS = {"host": 30, "ssd": 80, "remote": 200}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tiers", [{}, TIERS])
@pytest.mark.parametrize(("router", "gap"), [("random", 0.05), ("prefix", 0.05), ("prefix", 1.0)])
def test_fast_forward_changes_nothing(overlap, router, tiers, gap):
    trace = talks(num_talks=5, num_turns=3, seed=int(10 * gap), gap=gap)
    rates = {"overlap": overlap, "ssd_read": 4e10, "remote_read": 2e10, "matrix": 2e14}
    runs = [
        fleet(2, 40, rates=rates, router=router, fast_forwards=fast_forwards, **tiers)
        for fast_forwards in (True, False)
    ]
    for each in runs:
        each.run(trace.replay())
    assert state(runs[0]) == state(runs[1])


def test_nearly_all_steps_are_fast_forwarded(monkeypatch):
    made = []
    make = FastForward.make

    def watched(self, num_steps):
        made.append(num_steps)
        make(self, num_steps)

    monkeypatch.setattr(FastForward, "make", watched)
    simulated = fleet()
    simulated.run(talks(num_talks=4, gap=10.0).replay())
    assert sum(made) > 0.9 * simulated.replicas[0].engine.commit.num_steps


def test_a_pool_too_small_for_all_is_the_same_too():
    """Sequences give their blocks up and begin again."""
    trace = Trace()
    for number in range(8):
        trace.add(0.01 * number, [], 300, 300)
    runs = [
        fleet(
            1,
            74,
            block_size=16,
            rates={"overlap": overlap},
            router="random",
            fast_forwards=fast_forwards,
        )
        for overlap in (False, True)
        for fast_forwards in (True, False)
    ]
    for each in runs:
        each.run(trace.replay())
        assert len(each.replicas[0].answered) == len(trace)
        assert each.replicas[0].engine.scheduler.queues.num_preemptions
    assert state(runs[0]) == state(runs[1]) and state(runs[2]) == state(runs[3])
