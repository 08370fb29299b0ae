"""The same engine with one rank that works as several do, over a group of its own."""

from __future__ import annotations

from typing import Any

from quire.api.llm import LLM
from quire.bench.engine.timing import run_workload
from quire.bench.engine.workloads import Workload
from quire.engine.build import build_engine
from quire.engine.engine import Engine
from quire.errors import ConfigError


class GroupOfOne(LLM):
    def _build_engine(self, progress: bool) -> Engine:
        return build_engine(self.config, progress, through_group=True)


class RanksPeer:
    """One rank that runs all collectives, over a group of one: what they cost by themselves."""

    name = "quire over a group"
    says = "one rank over a group of its own takes {} times as long as the plain engine"

    def __init__(self, plain: LLM, settings: dict[str, Any], load: Workload) -> None:
        if plain.config.tensor_parallel_size > 1:
            raise ConfigError("--compare ranks is about one rank; leave out tensor_parallel_size.")
        blocks = plain.engine.scheduler.cache.num_blocks
        self.llm = GroupOfOne(**settings | {"num_blocks": blocks, "use_tqdm": False})
        run_workload(self.llm, load.warm_up())

    def seconds(self, workload: Workload) -> float:
        return run_workload(self.llm, workload).seconds

    def close(self) -> None:
        self.llm.close()


def room_for_two(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for the first of two engines on one device: half of the memory it would take."""
    if settings.get("num_blocks") is not None:
        return settings
    share = settings.get("gpu_memory_utilization", 0.9)
    return settings | {"gpu_memory_utilization": share / 2}
