"""Runs a workload on an engine and tells where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quire.api.llm import LLM
from quire.bench.workloads import Workload
from quire.runner.runner import ModelRunner


@dataclass(frozen=True)
class Timing:
    """One run of a workload."""

    seconds: float
    output_tokens: int
    computed_tokens: int  # tokens that went through the model
    cached_tokens: int
    decode_step_ms: float  # mean over the steps in which every sequence decodes
    host_share: float  # of those steps: the part outside the model

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


class StepClock:
    """Splits a run's time into steps, and each step into model and the rest."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, bool]] = []  # seconds, of them model, is decode
        self._model = 0.0

    @contextmanager
    def watch(self, runner: ModelRunner) -> Iterator[None]:
        """Count the time inside the model, synchronised where the device needs it."""
        model = runner.model
        forward, logits = model.forward, model.logits
        model.forward = self._timed(forward)  # type: ignore[method-assign]
        model.logits = self._timed(logits)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del model.forward, model.logits  # the class's own show through again

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._model += time.perf_counter() - started
            return result

        return timed

    def end_step(self, seconds: float, is_decode: bool) -> None:
        self.steps.append((seconds, self._model, is_decode))
        self._model = 0.0

    def decode_step(self) -> tuple[float, float]:
        """Mean milliseconds of a decode step, and the share of it outside the model."""
        decodes = [(whole, model) for whole, model, is_decode in self.steps if is_decode]
        whole = sum(each for each, _ in decodes)
        model = sum(each for _, each in decodes)
        if not decodes:
            return 0.0, 0.0
        return 1000 * whole / len(decodes), 1 - model / whole


def run_workload(llm: LLM, workload: Workload) -> Timing:
    """All requests at once, from a cold cache."""
    llm.reset_prefix_cache()
    engine, clock = llm.engine, StepClock()
    assert isinstance(engine.runner, ModelRunner)
    computed = engine.num_computed_tokens
    cached = engine.scheduler.num_hit_tokens
    started = time.perf_counter()
    with clock.watch(engine.runner):
        for i, (prompt, params) in enumerate(zip(workload.prompts, workload.params, strict=True)):
            engine.add_request(f"bench-{i}", prompt, params)
        while engine.has_unfinished_requests():
            waiting, before = len(engine.scheduler.waiting), time.perf_counter()
            prefilling = any(s.remaining > 1 for s in engine.scheduler.running)
            engine.step()
            clock.end_step(time.perf_counter() - before, not waiting and not prefilling)
    seconds = time.perf_counter() - started
    step_ms, host_share = clock.decode_step()
    return Timing(
        seconds,
        workload.output_tokens,
        engine.num_computed_tokens - computed,
        engine.scheduler.num_hit_tokens - cached,
        step_ms,
        host_share,
    )
