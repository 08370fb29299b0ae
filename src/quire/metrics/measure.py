"""A metric, said once: its name, what kind it is, and where its value is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Facts = Mapping[str, Any]
Labelled = Mapping[tuple[str, ...], float]  # by the values of the metric's own labels


@dataclass(frozen=True)
class Gauge:
    name: str
    help: str
    read: Callable[[Any], float | Labelled]
    labels: tuple[str, ...] = ()

    def family(self, facts: Any, common: Mapping[str, str]) -> Metric:
        metric = GaugeMetricFamily(self.name, self.help, labels=[*common, *self.labels])
        return _filled(metric, self.read(facts), common)


@dataclass(frozen=True)
class Counter:
    """Its name is said without the `_total` that Prometheus puts behind it."""

    name: str
    help: str
    read: Callable[[Any], float | Labelled]
    labels: tuple[str, ...] = ()

    def family(self, facts: Any, common: Mapping[str, str]) -> Metric:
        metric = CounterMetricFamily(self.name, self.help, labels=[*common, *self.labels])
        return _filled(metric, self.read(facts), common)


@dataclass(frozen=True)
class Histogram:
    """Read from a tally as plain data: `bounds`, `counts` and `sum`."""

    name: str
    help: str
    read: Callable[[Any], Facts]

    def family(self, facts: Any, common: Mapping[str, str]) -> Metric:
        tally = self.read(facts)
        metric = HistogramMetricFamily(self.name, self.help, labels=list(common))
        names = [*map(str, map(float, tally["bounds"])), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(tally["counts"])), strict=True))
        metric.add_metric(list(common.values()), buckets, tally["sum"])
        return metric


Measure = Gauge | Counter | Histogram


def _filled(
    metric: GaugeMetricFamily | CounterMetricFamily,
    values: float | Labelled,
    common: Mapping[str, str],
) -> Metric:
    for labels, value in by_labels(values).items():
        metric.add_metric([*common.values(), *labels], value)
    return metric


def by_labels(values: float | Labelled) -> Labelled:
    return values if isinstance(values, Mapping) else {(): values}


def names(measures: Iterable[Measure]) -> list[str]:
    """As Prometheus stores them; a histogram by the number of its values."""
    suffixes = {Gauge: "", Counter: "_total", Histogram: "_count"}
    return [each.name + suffixes[type(each)] for each in measures]
