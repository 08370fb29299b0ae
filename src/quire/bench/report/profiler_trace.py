"""What a profiler's trace says: where the time went, and how long the GPU had nothing to do.

A trace is a list of events as Chrome's viewer takes them: `ts` and `dur` in µs, and a category.
What counts is what happened inside the annotation `WINDOW`; in a trace of a GPU alone, which has
none, from the first kernel to the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

WINDOW = "quire: profiled"
ON_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_THE_CPU = {"cpu_op"}

Event = dict[str, Any]
Interval = tuple[float, float]  # start and end


@dataclass(frozen=True)
class Cost:
    """All calls of one kernel, or of one operator without those that it calls itself."""

    name: str
    calls: int
    seconds: float
    share: float  # of the window; kernels that run at once may come to more than 1 together


@dataclass(frozen=True)
class Findings:
    on_gpu: bool
    window_s: float
    idle_share: float  # of the window: no kernel ran, or on a CPU no operator
    costs: list[Cost]  # the largest first


def find_costs(events: Iterable[Event], most: int = 10) -> Findings:
    spans = [event for event in events if event.get("ph") == "X"]
    window, thread = _window(spans)
    kernels = _inside(spans, ON_THE_GPU, window)
    work = kernels or [e for e in _inside(spans, ON_THE_CPU, window) if e.get("tid") == thread]
    timed = ((e["name"], e["dur"]) for e in work) if kernels else _own_time(work)
    length = window[1] - window[0]
    return Findings(
        on_gpu=bool(kernels),
        window_s=length / 1e6,
        idle_share=idle_share(map(_interval, work), window),
        costs=_largest(timed, length, most),
    )


def _window(spans: list[Event]) -> tuple[Interval, Any]:
    """The profiled stretch, and the thread that ran it."""
    for event in spans:
        if event["name"] == WINDOW and event.get("cat") == "user_annotation":
            return _interval(event), event.get("tid")
    kernels = [_interval(event) for event in spans if event.get("cat") in ON_THE_GPU]
    if not kernels:
        raise ValueError("the trace has no profiled window")
    return (min(start for start, _ in kernels), max(end for _, end in kernels)), None


def _inside(spans: list[Event], categories: set[str], window: Interval) -> list[Event]:
    return [
        event
        for event in spans
        if event.get("cat") in categories and window[0] <= event["ts"] < window[1]
    ]


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _own_time(spans: list[Event]) -> Iterator[tuple[str, float]]:
    """Each operator of one thread with its time, less that of the operators inside it."""
    inner: dict[int, float] = defaultdict(float)
    open_calls: list[tuple[int, float]] = []  # and when each ends
    ordered = sorted(spans, key=lambda event: (event["ts"], -event["dur"]))
    for number, event in enumerate(ordered):
        while open_calls and open_calls[-1][1] <= event["ts"]:
            open_calls.pop()
        if open_calls:
            inner[open_calls[-1][0]] += event["dur"]
        open_calls.append((number, event["ts"] + event["dur"]))
    for number, event in enumerate(ordered):
        yield event["name"], event["dur"] - inner[number]


def _largest(timed: Iterable[tuple[str, float]], length: float, most: int) -> list[Cost]:
    totals: dict[str, list[float]] = defaultdict(list)
    for name, duration in timed:
        totals[name].append(duration)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        Cost(name, len(times), sum(times) / 1e6, sum(times) / length if length else 0.0)
        for name, times in ranked
    ]


def covered(intervals: Iterable[Interval], window: Interval) -> float:
    """How much of `window` lies in at least one of the intervals; two at once count once."""
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
