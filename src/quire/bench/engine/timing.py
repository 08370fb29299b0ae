"""Runs requests on an engine and tells what they took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.llm import LLM
from quire.beam_params import BeamSearchParams
from quire.bench.engine.step_clock import StepClock
from quire.bench.engine.workloads import Workload
from quire.errors import QuireError
from quire.lora_request import LoRARequest
from quire.params import SamplingParams


@dataclass(frozen=True)
class Timing:
    """One run of a workload."""

    seconds: float
    computed_tokens: int  # tokens that went through the model
    cached_tokens: int
    steps: int
    clock: StepClock


def generate_seconds(
    llm: LLM,
    prompts: list[list[int]],
    params: Sequence[SamplingParams | BeamSearchParams],
    adapters: Sequence[LoRARequest] | None = None,
) -> float:
    """Wall time of all requests together; one that fails is no result."""
    ask: Any = llm.beam_search if isinstance(params[0], BeamSearchParams) else llm.generate
    started = time.perf_counter()
    outputs = ask(prompts, params, use_tqdm=False, lora_request=adapters)
    seconds = time.perf_counter() - started
    for output in outputs:
        if output.error is not None:
            raise QuireError(f"A request of the benchmark failed: {output.error}")
    return seconds


def generate_processor_seconds(
    llm: LLM, prompts: list[list[int]], params: Sequence[SamplingParams]
) -> float:
    """The same in processor time, of all threads of this process."""
    started = time.process_time()
    generate_seconds(llm, prompts, params)
    return time.process_time() - started


def run_workload(llm: LLM, workload: Workload) -> Timing:
    """All requests at once, from a cold cache."""
    llm.reset_prefix_cache()
    before, clock = llm.stats(), StepClock()
    with clock.watch(llm.engine):
        seconds = generate_seconds(llm, workload.prompts, workload.params)
    after = llm.stats()
    return Timing(
        seconds=seconds,
        computed_tokens=after["tokens"]["computed"] - before["tokens"]["computed"],
        cached_tokens=after["prefix"]["hits"] - before["prefix"]["hits"],
        steps=after["steps"] - before["steps"],
        clock=clock,
    )
