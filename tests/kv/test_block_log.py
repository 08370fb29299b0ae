"""What is told of an engine's blocks, beside what it holds."""

from block_events import follow, take_all
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.kv import block_log
from quire.kv.block_log import BlockLog, Place

PLACES = st.sampled_from(list(Place))
KEYS = st.lists(st.integers(0, 9).map(lambda number: bytes([number]) * 32), max_size=6)


class LogMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.log = BlockLog()
        self.held = {place: set() for place in Place}
        self.told = set()

    @initialize()
    def begin(self):
        events = self.log.take()
        assert events.cleared and not events.stored

    @rule(place=PLACES, keys=KEYS)
    def store(self, place, keys):
        self.log.store(place, keys)
        self.held[place] |= {key[:16] for key in keys}

    @rule(place=PLACES, keys=KEYS)
    def remove(self, place, keys):
        self.log.remove(place, keys)
        self.held[place] -= {key[:16] for key in keys}

    @rule(place=PLACES)
    def clear(self, place):
        self.log.clear(place)
        self.held[place].clear()

    @rule(most=st.integers(1, 5))
    def take_a_part(self, most):
        follow(self.told, self.log.take(most))

    @rule()
    def take_all(self):
        while self.log:
            follow(self.told, self.log.take(3))
        assert self.told == set().union(*self.held.values())


TestAgainstTheModel = LogMachine.TestCase
TestAgainstTheModel.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


def test_what_nobody_takes_is_bounded_and_told_anew(monkeypatch):
    monkeypatch.setattr(block_log, "MOST_UNTOLD", 100)
    log, told = BlockLog(), set()
    first = [number.to_bytes(32, "big")[::-1] for number in range(50)]
    log.store(Place.HOST, first)
    follow(told, log.take())
    assert len(told) == 50
    for number in range(1000):  # each comes and goes
        key = (10_000 + number).to_bytes(32, "big")[::-1]
        log.store(Place.DEVICE, [key])
        log.remove(Place.DEVICE, [key])
        assert len(log._changed) <= 50 + 101
    events = log.take()
    assert events.cleared
    follow(told, events)
    assert take_all(log, told) == {key[:16] for key in first}
