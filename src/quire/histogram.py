"""Counts of values by size: a histogram that is cheap to add to and plain to send."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

# Seconds, from what a fast model needs for a token to what a long answer takes.
SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
LONG_S = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
SECONDS = SHORT_S + LONG_S
TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
STEP_TOKENS = tuple(2**power for power in range(15))


class BucketCounts:
    """How many values were at most each of `bounds`, and how many above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def as_dict(self) -> dict[str, Any]:
        """`counts` has one more entry than `bounds`: what was above them all."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}
