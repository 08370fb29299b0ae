"""Readers of a replica's blocks: each learns what is held, whenever it asks."""

from __future__ import annotations

import random

import pytest

from quire.engine.process.messages import unpack_events
from quire.kv.events import SHORT_KEY, BlockEvents
from quire.serve.block_feed import BlockFeed


class Reader:
    def __init__(self) -> None:
        self.position = 0
        self.held: set[bytes] = set()
        self.num_full = 0

    def ask(self, feed: BlockFeed) -> None:
        self.position, message = feed.since(self.position)
        events = unpack_events(message)
        assert not set(events.removed) & set(events.stored)
        if events.cleared:
            self.held.clear()
            self.num_full += 1
        self.held -= set(events.removed)
        self.held |= set(events.stored)


def key(number: int) -> bytes:
    return number.to_bytes(SHORT_KEY, "big")


@pytest.mark.parametrize("seed", range(5))
def test_readers_that_ask_now_and_then(seed: int) -> None:
    rng = random.Random(seed)
    feed, held = BlockFeed(most_logged=50), set[bytes]()
    often, seldom = Reader(), Reader()
    for step in range(2000):
        if rng.random() < 0.005:
            feed.apply(BlockEvents(cleared=True))
            held.clear()
        number = key(rng.randrange(40))
        if number in held:
            held.remove(number)
            feed.apply(BlockEvents(removed=[number]))
        else:
            held.add(number)
            feed.apply(BlockEvents(stored=[number]))
        if rng.random() < 0.3:
            often.ask(feed)
            assert often.held == held
        if step % 100 == 99:
            seldom.ask(feed)
            assert seldom.held == held
    assert often.num_full < 40 and seldom.num_full > 10


def test_one_who_is_up_to_date_is_told_nothing() -> None:
    feed, reader = BlockFeed(), Reader()
    feed.apply(BlockEvents(True, (), [key(1), key(2)]))
    reader.ask(feed)
    assert reader.held == {key(1), key(2)}
    assert unpack_events(feed.since(reader.position)[1]) == BlockEvents(False, [], [])


def test_the_latest_blocks_are_kept() -> None:
    feed, reader, late = BlockFeed(most_held=3), Reader(), Reader()
    reader.ask(feed)
    for number in (1, 2, 3, 1, 4):
        feed.apply(BlockEvents(stored=[key(number)]))
        reader.ask(feed)
    late.ask(feed)
    assert reader.held == late.held == {key(3), key(1), key(4)}
    assert reader.num_full == 1
