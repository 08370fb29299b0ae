"""The events of a stream that outlives its client: any number of readers, each from any place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

NOTHING_NEW = b":\n\n"  # a comment: a stream of events must begin with something


class EventLog:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, events: Iterable[bytes]) -> None:
        for event in events:
            self._events.append(event)
            self.num_bytes += len(event)
        self._wake()

    def close(self) -> None:
        """No more events come."""
        self._is_closed = True
        self._wake()

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events behind the one with this number, those to come among them."""
        known, place = self._events[number + 1 :], max(number + 1, len(self._events))
        yield b"".join(known) or NOTHING_NEW
        while True:
            changed = self._changed
            if place < len(self._events):
                new, place = self._events[place:], len(self._events)
                yield b"".join(new)
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
