"""The same measures as curves in TensorBoard's files; `pip install 'quire[tensorboard]'`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from quire.errors import ConfigError
from quire.metrics.growth import GrowthRate
from quire.metrics.measure import Counter, Facts, Gauge, Histogram, Measure, by_labels
from quire.metrics.quire_metrics import QUIRE
from quire.metrics.record import RequestRecord
from quire.metrics.vllm_metrics import ENGINE, REQUESTS, RequestStats

_NOT_IN_NAMES = re.compile(r"[^-/\w.]")  # the writer complains of such characters


class Curves:
    """Gauges as they are, counters by the second, histograms of what came since the last look.

    And each request's times as it ends.
    """

    def __init__(self, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "tensorboard needs its writer; install it with pip install 'quire[tensorboard]'."
            ) from None
        try:
            self._writer = SummaryWriter(folder, flush_secs=10)
        except OSError as error:
            raise ConfigError(f"tensorboard cannot write to {folder}: {error.strerror}.") from None
        self._clock = clock
        self._allocated = GrowthRate(clock)
        self._before: dict[str, float] = {}
        self._buckets_before: dict[str, Facts] = {}
        self._seen = clock()
        self._num_requests = 0

    def see(self, stats: dict[str, Any], requests: RequestStats) -> None:
        """What /metrics has of an engine and of its requests."""
        now = self._clock()
        step, passed, self._seen = stats["steps"], max(now - self._seen, 1e-3), now
        rate = self._allocated.after(stats["blocks"]["allocated"])
        for measure in (*QUIRE, *ENGINE):
            self._write(measure, {**stats, "rate": rate}, step, passed)
        for measure in REQUESTS:
            self._write(measure, requests, step, passed)

    def add(self, record: RequestRecord) -> None:
        self._num_requests += 1
        times = {"seconds": record.seconds, "first_token_s": record.time_to_first_token}
        for name, value in times.items():
            if value is not None:
                self._writer.add_scalar(f"request/{name}", value, self._num_requests)

    def close(self) -> None:
        self._writer.close()

    def _write(self, measure: Measure, facts: Any, step: int, passed: float) -> None:
        if isinstance(measure, Histogram):
            self._write_histogram(_name(measure), measure.read(facts), step)
        elif measure.name != "vllm:cache_config_info":  # whose facts are in its labels
            for labels, value in by_labels(measure.read(facts)).items():
                name = _name(measure, *labels)
                if isinstance(measure, Counter):
                    self._before[name], before = value, self._before.get(name, 0.0)
                    name, value = f"{name}_per_second", (value - before) / passed
                self._writer.add_scalar(name, value, step)

    def _write_histogram(self, name: str, now: Facts, step: int) -> None:
        before = self._buckets_before.get(name, {"counts": [0] * len(now["counts"]), "sum": 0.0})
        self._buckets_before[name] = now
        counts = [new - old for new, old in zip(now["counts"], before["counts"], strict=True)]
        if not any(counts) or min(counts) < 0:  # nothing new, or it began again
            return
        bounds = now["bounds"]
        starts, ends = [0.0, *bounds], [*bounds, 2.0 * bounds[-1]]  # above all bounds: say twice
        filled = [at for at, count in enumerate(counts) if count]
        middles = [(start + end) / 2 for start, end in zip(starts, ends, strict=True)]
        self._writer.add_histogram_raw(
            name,
            min=starts[filled[0]],
            max=ends[filled[-1]],
            num=sum(counts),
            sum=now["sum"] - before["sum"],
            sum_squares=sum(n * middle**2 for n, middle in zip(counts, middles, strict=True)),
            bucket_limits=ends,
            bucket_counts=counts,
            global_step=step,
        )


def _name(measure: Gauge | Counter | Histogram, *labels: str) -> str:
    plain = [label.replace("+", "_or_more") for label in labels]
    return _NOT_IN_NAMES.sub("_", "/".join([measure.name.replace(":", "/"), *plain]))
