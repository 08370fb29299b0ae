"""Counts of values by size: a histogram that is cheap to add to and plain to send."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Tally:
    """How many values were at most each of `bounds`, and how many above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def as_dict(self) -> dict[str, Any]:
        """`counts` has one more entry than `bounds`: what was above them all."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}
