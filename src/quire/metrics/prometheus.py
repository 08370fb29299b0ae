"""All metrics of one server as Prometheus reads them; each server has a registry of its own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.metrics.growth import GrowthRate
from quire.metrics.measure import Measure
from quire.metrics.quire_metrics import QUIRE
from quire.metrics.record import RequestRecord
from quire.metrics.vllm_metrics import ENGINE, REQUESTS, RequestStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
MEASURES: list[Measure] = [*QUIRE, *ENGINE, *REQUESTS]
# Those that an engine has which keeps no blocks: it embeds and scores.
WITHOUT_BLOCKS = {
    "quire_steps",
    "quire_computed_tokens",
    "quire_failed_steps",
    "quire_token_budget",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens",
    "vllm:iteration_tokens_total",
}
FIRST = "0"


class Metrics(Collector):
    """`see` the engine's stats and `add` requests as they end; `text` is what is scraped."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = RequestStats()  # of the first engine, and requests that reached none
        self._model_name = model_name
        self._requests = {FIRST: self.requests}
        self._stats: dict[str, dict[str, Any]] = {}
        self._allocated: defaultdict[str, GrowthRate] = defaultdict(lambda: GrowthRate(clock))
        self._allocated[FIRST] = GrowthRate(clock)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def see(self, stats: dict[str, Any], engine: str = FIRST) -> None:
        if "blocks" in stats:
            rate = self._allocated[engine].after(stats["blocks"]["allocated"])
            stats = {**stats, "rate": rate}
        self._stats[engine] = stats

    def add(self, record: RequestRecord) -> None:
        if record.engine not in self._requests:
            self._requests[record.engine] = RequestStats()
        self._requests[record.engine].add(record)

    def refuse(self, reason: str) -> None:
        self.requests.refused[reason] += 1

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for measure in REQUESTS:
            yield self._family(measure, self._requests)
        has_blocks = any("blocks" in stats for stats in self._stats.values())
        for measure in (*QUIRE, *ENGINE) if self._stats else ():
            if has_blocks or measure.name in WITHOUT_BLOCKS:
                yield self._family(measure, self._stats)

    def _family(self, measure: Measure, facts: Mapping[str, Any]) -> Metric:
        """One metric with a line, or several, for each engine."""
        model = self._model_name
        first, *others = (
            measure.family(each, {"model_name": model, "engine": engine})
            for engine, each in sorted(facts.items())
        )
        for other in others:
            first.samples += other.samples
        return first
