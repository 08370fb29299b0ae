"""What the connector has done, in vLLM's logs and in its `/metrics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

SAYS = {
    "loaded_blocks": "KV blocks brought from Quire's tiers into vLLM's memory",
    "failed_blocks": "KV blocks that a tier had lost: they are computed again",
    "saved_blocks": "KV blocks given to Quire's tiers",
}


@dataclass
class QuireStats(KVConnectorStats):
    """Counts since the last report, over all workers."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class QuireMetrics(KVConnectorPromMetrics):
    """A counter for each of them: `vllm:quire_loaded_blocks` and so on."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, says in SAYS.items():
            counter: Any = self._counter_cls(
                name=f"vllm:quire_{name}", documentation=says, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
