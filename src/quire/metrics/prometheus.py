"""All metrics of one server as Prometheus reads them; each server has a registry of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.metrics.cache import CACHE
from quire.metrics.measure import Measure
from quire.metrics.record import RequestRecord
from quire.metrics.vllm import ENGINE, REQUESTS, RequestTallies

CONTENT_TYPE = CONTENT_TYPE_LATEST
MEASURES: list[Measure] = [*CACHE, *ENGINE, *REQUESTS]
WINDOW_S = 30.0


class Metrics(Collector):
    """`see` the engine's stats and `add` requests as they end; `text` is what is scraped."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = RequestTallies()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats: dict[str, Any] | None = None
        self._allocated = _Rate(clock)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def see(self, stats: dict[str, Any]) -> None:
        rate = self._allocated.after(stats["blocks"]["allocated"])
        self._stats = {**stats, "rate": rate}

    def add(self, record: RequestRecord) -> None:
        self.requests.add(record)

    def refuse(self, reason: str) -> None:
        self.requests.refused[reason] += 1

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for measure in REQUESTS:
            yield measure.family(self.requests, self._labels)
        if self._stats is not None:
            for measure in (*CACHE, *ENGINE):
                yield measure.family(self._stats, self._labels)


class _Rate:
    """How fast a counter has grown over the last half minute, or since it was last looked at."""

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
