"""Notices what does not get on, in a thread of its own.

It counts its own ticks, not the clock's: time in which the whole process stood still, because
it was stopped or the machine slept, is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STUCK_S = 60.0  # without any progress, at work
STARTING_S = 1800.0  # at the start: weights may come from far away
TICKS = 10  # in that time


def none() -> int:
    """The progress of a call that shows none before it is over."""
    return 0


@dataclass(eq=False)
class Call:
    name: str
    progress: Callable[[], int]
    seen: int = -1
    ticks: int = 0  # since it was last seen to get on


class Watchdog:
    """When a call does not get on for `bound` seconds, `on_stuck` is told its name, once."""

    def __init__(self, on_stuck: Callable[[str], None], bound: float) -> None:
        self.bound = bound
        self._on_stuck = on_stuck
        self._calls: list[Call] = []
        self._stopped = threading.Event()
        thread = threading.Thread(target=self._run, name="quire watchdog", daemon=True)
        thread.start()

    @contextmanager
    def call(self, name: str, progress: Callable[[], int] = none) -> Iterator[None]:
        """`progress` is a number that changes as long as the call gets on."""
        call = Call(name, progress)
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    @property
    def under_way(self) -> str | None:
        """What has been going on for the longest, if anything is."""
        return next((call.name for call in list(self._calls)), None)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self.bound / TICKS):
            for call in list(self._calls):
                now = call.progress()
                call.ticks = call.ticks + 1 if now == call.seen else 0
                call.seen = now
                if call.ticks >= TICKS:
                    self._on_stuck(call.name)
                    return
