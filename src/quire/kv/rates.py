"""Measured rates of loading and computing, by which the scheduler chooses the faster one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

NEWEST = 0.3  # the share of the newest observation in the estimate
VALID_S = 60.0  # what was slow a minute ago deserves another try


class Rates:
    """Units a second by name, each a moving average. What was not seen lately has no rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds_per_unit: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._lock = threading.Lock()

    def observe(self, name: str, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        new = seconds / units
        with self._lock:
            old = self._seconds_per_unit.get(name, new)
            self._seconds_per_unit[name] = old + NEWEST * (new - old)
            self._seen[name] = self._clock()

    def seconds_for(self, name: str, units: float) -> float | None:
        """How long this would take; None if there is no observation of the last minute."""
        per_unit = self._seconds_per_unit.get(name)
        if per_unit is None or self._clock() - self._seen[name] > VALID_S:
            return None
        return per_unit * units

    def as_dict(self) -> dict[str, float]:
        return {name: 1 / each for name, each in dict(self._seconds_per_unit).items()}
