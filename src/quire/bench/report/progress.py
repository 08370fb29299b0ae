"""How far a benchmark is: told only between its runs, so that it costs none of them anything."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from quire.config import EngineConfig
from quire.models.checkpoints.origin import announce
from quire.progress import draws_bars, say_step

MOST_LINES = 50


def announce_model(settings: dict[str, Any]) -> None:
    """What is going to be loaded; before torch is imported, which takes seconds."""
    config = EngineConfig.create(**settings)
    announce(config.model, config.load_format)


def runs_bar(what: str, total: int, unit: str = "run") -> Any:
    """A bar where one can be drawn, else lines on stderr; `update` after each run."""
    if not draws_bars():
        return RunLines(what, total, unit)
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, leave=False)


class RunLines:
    """A line for each run, or where there are many for every so many; used as tqdm's bar is."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._num_done = 0
        self._due = 0  # runs that are done when the next line is
        self._started = time.perf_counter()
        self.update(0)

    def update(self, count: int = 1) -> None:
        self._num_done += count
        if self._num_done >= self._due:
            self._due = min(self._total, self._num_done + max(1, self._total // MOST_LINES))
            seconds = time.perf_counter() - self._started
            done = f"{self._num_done:,} of {self._total:,} {self._unit}s"
            say_step(f"{self._what}: {done}, {seconds:.1f} s")

    def close(self) -> None:
        """All has been told."""

    def __enter__(self) -> RunLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
