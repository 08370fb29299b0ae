"""A log of events has any number of readers, and each gets every event behind its place once."""

from __future__ import annotations

import asyncio

import pytest

from quire.api.server.responses.event_log import NOTHING_NEW, EventLog


def events(first: int, end: int) -> list[bytes]:
    return [b"%d " % number for number in range(first, end)]


@pytest.mark.parametrize("after", [-1, 0, 2, 4, 7])
def test_what_comes_while_a_reader_is_busy_is_not_lost(after: int) -> None:
    """A reader may send the first events before it asks for the next."""

    async def read() -> tuple[bytes, bytes]:
        log = EventLog()
        log.add(events(0, 3))
        reader = log.after(after)
        first = await anext(reader)
        log.add(events(3, 6))
        second = asyncio.ensure_future(anext(reader, b""))
        await asyncio.sleep(0)
        log.add(events(6, 9))
        log.close()
        return first, b"".join([await second, *[event async for event in reader]])

    first, rest = asyncio.run(read())
    assert first == (b"".join(events(after + 1, 3)) or NOTHING_NEW)
    assert rest == b"".join(events(max(after + 1, 3), 9))


def test_readers_end_with_the_log() -> None:
    async def read() -> list[bytes]:
        log = EventLog()
        log.add(events(0, 2))
        log.close()
        return [event async for event in log.after(5)]

    assert asyncio.run(read()) == [NOTHING_NEW]
