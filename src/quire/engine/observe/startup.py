"""The phases of a start: each is told as it begins, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]


class Startup:
    """Times the phases of a start, in order; `say` gets a line for each before it begins."""

    def __init__(self, say: Say | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._say = say

    @contextmanager
    def phase(self, name: str, line: str = "") -> Iterator[None]:
        """`line` says what is being done; a phase without one is too short to be told."""
        if line and self._say is not None:
            self._say(line)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def __str__(self) -> str:
        each = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        return f"ready in {sum(self.seconds.values()):.2f} s: {each}"
