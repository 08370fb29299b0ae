"""One figure, measured several times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """The median is the figure; minimum and maximum show its spread."""

    runs: tuple[float, ...]

    def __init__(self, runs: Iterable[float]) -> None:
        object.__setattr__(self, "runs", tuple(runs))

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    def map(self, convert: Callable[[float], float]) -> Sample:
        return Sample(map(convert, self.runs))

    def as_dict(self) -> dict[str, float | list[float]]:
        return {
            "median": self.median,
            "min": min(self.runs),
            "max": max(self.runs),
            "runs": list(self.runs),
        }

    def __str__(self) -> str:
        if len(self.runs) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(min(self.runs))} to {number(max(self.runs))})"


def number(value: float) -> str:
    """Three significant digits, or all before the decimal point."""
    size = abs(value)
    return f"{value:,.{3 if size < 1 else 2 if size < 10 else 1 if size < 1000 else 0}f}"
