"""How fast a counter grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 30.0


class GrowthRate:
    """Of a counter over the last half minute, or since it was last looked at."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque([(clock(), 0.0)])

    def after(self, value: float) -> float:
        now = self._clock()
        if value < self._seen[-1][1]:  # it began again
            self._seen.clear()
        self._seen.append((now, value))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        return (value - before) / (now - then) if now > then else 0.0
