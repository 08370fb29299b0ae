"""Time that is covered by intervals: two kernels at once are busy once."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]  # start and end


def covered(intervals: Iterable[Interval], window: Interval) -> float:
    """How much of `window` lies in at least one of the intervals."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total += end - start
            reached = end
    return total


def idle_share(intervals: Iterable[Interval], window: Interval) -> float:
    """The part of `window`, from 0 to 1, in which nothing ran."""
    length = window[1] - window[0]
    return 1 - covered(intervals, window) / length if length > 0 else 0.0
