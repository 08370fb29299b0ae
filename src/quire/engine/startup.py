"""How long each part of starting took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Startup:
    """Times the phases of a start, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def __str__(self) -> str:
        each = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        return f"ready in {sum(self.seconds.values()):.2f} s: {each}"
