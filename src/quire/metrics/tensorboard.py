"""The same measures as curves in TensorBoard's files; `pip install 'quire[tensorboard]'`."""

from __future__ import annotations

import time
from typing import Any

from quire.errors import ConfigError
from quire.metrics.measure import Counter, Gauge, by_labels
from quire.metrics.quire_metrics import QUIRE
from quire.metrics.record import RequestRecord
from quire.metrics.vllm_metrics import ENGINE


class Curves:
    """Gauges as they are, counters by the second, and each request's times as it ends."""

    def __init__(self, folder: str) -> None:
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
        self._before: dict[str, float] = {}
        self._seen = time.monotonic()
        self._num_requests = 0

    def see(self, stats: dict[str, Any]) -> None:
        now = time.monotonic()
        step, passed, self._seen = stats["steps"], max(now - self._seen, 1e-3), now
        for measure in (*QUIRE, *ENGINE):
            if isinstance(measure, (Gauge, Counter)) and measure.name != "vllm:cache_config_info":
                for labels, value in by_labels(measure.read({"rate": 0.0, **stats})).items():
                    name = "/".join([measure.name.replace(":", "/"), *labels])
                    if isinstance(measure, Counter):
                        self._before[name], before = value, self._before.get(name, 0.0)
                        name, value = f"{name}_per_second", (value - before) / passed
                    self._writer.add_scalar(name, value, step)

    def add(self, record: RequestRecord) -> None:
        self._num_requests += 1
        times = {"seconds": record.seconds, "first_token_s": record.time_to_first_token}
        for name, value in times.items():
            if value is not None:
                self._writer.add_scalar(f"request/{name}", value, self._num_requests)

    def close(self) -> None:
        self._writer.close()
