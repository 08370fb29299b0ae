"""When a breaker opens, when it may be tried, and when it closes."""

from __future__ import annotations

import pytest

from quire.kv.tiers.remote.breaker import Breaker, State


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock, **settings: float) -> Breaker:
    breaker = Breaker(limit=1, clock=clock, **settings)
    breaker.failed("read")
    return breaker


def test_it_opens_after_failures_in_a_row_only(clock: Clock) -> None:
    breaker = Breaker(limit=3, clock=clock)
    for _ in range(5):
        assert not breaker.failed("read")
        assert not breaker.failed("read")
        breaker.succeeded("read")
    assert [breaker.failed("read") for _ in range(3)] == [False, False, True]
    assert breaker.state is State.OPEN


def test_kinds_of_calls_are_counted_apart(clock: Clock) -> None:
    """A store that answers questions but does not deliver is asked less and less."""
    breaker = Breaker(limit=3, backoff=1.0, clock=clock)
    for _ in range(2):
        assert not breaker.failed("read")
        breaker.succeeded("ask")
    assert breaker.failed("read")
    clock.now += 1
    breaker.start_probe()
    breaker.end_probe(True)
    breaker.succeeded("ask")
    assert not breaker.failed("write") and breaker.failed("read")
    assert (breaker.seconds_to_probe() or 0) > 1.5


def test_one_caller_probes_and_only_after_the_backoff(clock: Clock) -> None:
    breaker = opened(clock, backoff=2.0)
    assert not breaker.start_probe()
    assert 1.6 <= (breaker.seconds_to_probe() or 0) <= 2.0
    clock.now += 2.0
    assert breaker.start_probe() and not breaker.start_probe()
    assert breaker.state is State.HALF_OPEN and breaker.seconds_to_probe() is None
    breaker.end_probe(True)
    assert breaker.state is State.CLOSED


def test_the_backoff_doubles_up_to_its_cap(clock: Clock) -> None:
    breaker = opened(clock, backoff=1.0, cap=4.0)
    waits = []
    for _ in range(5):
        waits.append(breaker.seconds_to_probe() or 0)
        clock.now += waits[-1]
        assert breaker.start_probe()
        breaker.end_probe(False)
    for wait, most in zip(waits, [1, 2, 4, 4, 4], strict=True):
        assert 0.8 * most <= wait <= most


def test_a_probe_alone_does_not_make_the_backoff_short_again(clock: Clock) -> None:
    """A store that greets and then does not serve is asked less and less."""
    breaker = Breaker(limit=3, backoff=1.0, clock=clock)
    waits = []
    for _ in range(3):
        while breaker.state is State.CLOSED:
            breaker.failed("read")
        waits.append(breaker.seconds_to_probe() or 0)
        clock.now += waits[-1]
        breaker.start_probe()
        breaker.end_probe(True)
    assert waits[1] > 1.2 * waits[0] and waits[2] > 1.2 * waits[1]
    breaker.succeeded("read")
    for _ in range(3):
        breaker.failed("read")
    assert (breaker.seconds_to_probe() or 0) <= 1.0


def test_a_late_success_does_not_close_it(clock: Clock) -> None:
    breaker = opened(clock)
    breaker.succeeded("read")
    assert breaker.state is State.OPEN


def test_what_starts_open_may_be_tried_at_once(clock: Clock) -> None:
    breaker = Breaker(state=State.OPEN, clock=clock)
    assert breaker.seconds_to_probe() == 0 and breaker.start_probe()


def test_calls_that_are_their_own_probes(clock: Clock) -> None:
    breaker = Breaker(limit=1, backoff=1.0, clock=clock)
    assert breaker.allows()
    breaker.report(False)
    assert not breaker.allows()
    clock.now += 1
    assert breaker.allows() and not breaker.allows()
    breaker.report(True)
    assert breaker.allows()
