"""When blocks were last used: noted in memory at once, on disk every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

FLUSH_SECONDS = 2.0  # how much of the order of use a kill may cost


class Stamps:
    """Thread-safe."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._flushed = time.monotonic()
        self._lock = threading.Lock()

    def note(self, places: Sequence[int]) -> None:
        """Used now; the first one counts as the last used, because the others need it."""
        now = time.time_ns()
        with self._lock:
            self._used.update(zip(places, range(now, now - len(places), -1), strict=True))

    def due(self, *, now: bool = False) -> dict[int, int]:
        """What is to be written, by place: everything that was noted, if it is time."""
        with self._lock:
            if not now and time.monotonic() - self._flushed < FLUSH_SECONDS:
                return {}
            self._flushed = time.monotonic()
            used, self._used = self._used, {}
            return used
