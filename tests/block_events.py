"""Block events followed as a router does, for tests of the parts that publish them."""

from __future__ import annotations

from quire.kv.block_log import BlockLog
from quire.kv.events import BlockEvents


def follow(told: set[bytes], events: BlockEvents) -> None:
    """Only what is news may be told."""
    assert not set(events.stored) & set(events.removed)
    if events.cleared:
        told.clear()
    assert told >= set(events.removed) and not told & set(events.stored)
    told -= set(events.removed)
    told |= set(events.stored)


def take_all(log: BlockLog, told: set[bytes]) -> set[bytes]:
    while log:
        follow(told, log.take())
    return told
