"""Simulated time: it passes only when `now` is set."""

from __future__ import annotations


class Clock:
    """One replica's: it is called as `time.monotonic` is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
