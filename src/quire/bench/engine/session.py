"""An engine to be measured, with the machine's rates and the limits that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quire.api.llm import LLM
from quire.bench.report.machine import in_words, machine_facts
from quire.bench.report.machine_rates import Rates, measured_rates
from quire.bench.report.roofline import Roofline
from quire.config import EngineConfig
from quire.engine.schedule.no_tiers import NoTiers
from quire.engine.schedule.tiering import Tiering
from quire.errors import ConfigError
from quire.kv.store import KVStore
from quire.models.held import item_sizes
from quire.models.source import ModelSource
from quire.ranks.rank_model import open_source
from quire.runner.device import choose_device, choose_dtype
from quire.runner.runner import ModelRunner


@dataclass(frozen=True)
class Session:
    llm: LLM
    source: ModelSource
    roofline: Roofline
    device: torch.device
    dtype: torch.dtype

    def report(self, workload: str, says: str) -> dict[str, Any]:
        """The part of a result that does not depend on what was measured."""
        name = str(self.dtype).removeprefix("torch.")
        model = self.llm.config.model
        return {
            "workload": workload,
            "says": f"{workload}: {says}; {model} in {name}",
            "model": model,
            "dtype": name,
            **where(self.device, self.dtype, self.roofline.rates),
        }

    def check_room(self, tokens: int, mend: str) -> None:
        """Answers that were cut short would be counted as whole ones."""
        room = self.llm.engine.model.max_model_len
        if tokens > room:
            raise ConfigError(
                f"The longest request has {tokens:,} tokens with its answer and max_model_len is "
                f"{room:,}; {mend}."
            )

    def tiering(self, workload: str) -> tuple[Tiering, KVStore]:
        """The tiers below the device, for a workload that measures them."""
        tiering = self.llm.engine.scheduler.tiering
        if isinstance(tiering, NoTiers):
            raise ConfigError(
                f"{workload} needs a lower tier; add --host-cache-bytes or --ssd-cache-dir."
            )
        assert isinstance(tiering.store, KVStore)
        return tiering, tiering.store


@contextmanager
def open_session(settings: dict[str, Any]) -> Iterator[Session]:
    config = EngineConfig.create(**settings)
    device = choose_device(config.device)
    source = open_source(config, device, progress=True)
    dtype = choose_dtype(config.dtype, source.config, device)
    rates = measured_rates(device, dtype)  # first, while the memory is empty
    if device.type == "cuda":
        rates = rates.of_devices(config.tensor_parallel_size)
    with LLM(**settings) as llm:
        assert isinstance(llm.engine.runner, ModelRunner)
        layout = llm.engine.runner.cache.layout
        values = sum(len(group.layers) * group.layer_values for group in layout.groups)
        kv_itemsize = layout.token_bytes / values  # scales counted in
        sizes = item_sizes(source.config, dtype)
        roofline = Roofline(source.config, rates, sizes.others, kv_itemsize, sizes.experts)
        yield Session(llm, source, roofline, device, dtype)


def where(device: torch.device, dtype: torch.dtype, rates: Rates) -> dict[str, Any]:
    """The machine and its rates, in words and as figures."""
    facts = machine_facts(device)
    name = str(dtype).removeprefix("torch.")
    rated = f"copies at {rates.copy / 1e9:,.0f} GB/s, {name} products at {_flops(rates.matrix)}"
    return {
        "on": f"{in_words(facts)}\n{rated}: the limits follow from these two",
        "machine": facts,
        "rates": {
            "copy_bytes_per_s": rates.copy,
            "matrix_operations_per_s": rates.matrix,
        },
    }


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"
