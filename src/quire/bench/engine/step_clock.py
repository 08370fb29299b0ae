"""Splits the steps of a run on a CPU into model and the rest.

A GPU works while the host goes on, so there the profiler has to tell (`--profile`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.engine.engine import Engine
from quire.runner.runner import ModelRunner


class StepClock:
    """Counts nothing where the device is no CPU."""

    def __init__(self) -> None:
        self._decodes: list[tuple[float, float]] = []  # seconds, of them in the model
        self._model = 0.0

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        assert isinstance(engine.runner, ModelRunner)
        if engine.runner.device.type != "cpu":
            yield
            return
        runner, model = engine.runner, engine.runner.model
        engine.step = self._timed_step(engine, engine.step)  # type: ignore[method-assign]
        runner.run_layers = self._timed(runner.run_layers)  # type: ignore[method-assign]
        model.logits = self._timed(model.logits)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del engine.step, runner.run_layers, model.logits  # the class's own show through again

    @property
    def has_steps(self) -> bool:
        return bool(self._decodes)

    @property
    def decode_step_ms(self) -> float:
        """Mean over the steps in which every sequence decoded."""
        whole = sum(seconds for seconds, _ in self._decodes)
        return 1e3 * whole / len(self._decodes)

    @property
    def host_share(self) -> float:
        """The part of those steps that is outside the model."""
        whole = sum(seconds for seconds, _ in self._decodes)
        return 1 - sum(model for _, model in self._decodes) / whole

    def _timed_step(self, engine: Engine, step: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            scheduler, self._model = engine.scheduler, 0.0
            prefills = len(scheduler.waiting) or any(s.remaining > 1 for s in scheduler.running)
            started = time.perf_counter()
            outputs = step()
            if not prefills:
                self._decodes.append((time.perf_counter() - started, self._model))
            return outputs

        return timed

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            self._model += time.perf_counter() - started
            return result

        return timed
