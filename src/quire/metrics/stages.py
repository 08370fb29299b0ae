"""How long a request was in each stage, from the moments at which the stages began."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

Stages = Sequence[tuple[str, float]]  # "queued", "loading", "prefill", "decode", … and when


class Span(NamedTuple):
    stage: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def spans(stages: Stages) -> Iterator[Span]:
    """Each stage until the next; the last entry says only when it was over."""
    for (stage, start), (_, end) in pairwise(stages):
        yield Span(stage, start, end)


def seconds_in(stages: Stages) -> dict[str, float]:
    """Over all visits. The time after it was preempted is its own stage, until it runs again."""
    totals: dict[str, float] = {}
    for span in spans(stages):
        totals[span.stage] = totals.get(span.stage, 0.0) + span.seconds
    return totals


def first(stages: Stages, stage: str) -> float | None:
    """When a stage was first entered."""
    return next((at for name, at in stages if name == stage), None)
