"""When each of the engine's next decode steps begins, as far as there is nothing to decide in them.

`FastForward` is planned when such steps begin and made when something interrupts them, or at their
end. The outcome is, to the last bit, that of single steps.

    without overlap    │ step 1 │ step 2 │ …              begins: now, end of 1, end of 2, …
    with overlap       │ under way │ step 1 │ step 2 │ …  begins: now, its end, end of 1, …
"""

from __future__ import annotations

import numpy as np

from quire.engine.engine import Engine
from quire.engine.schedule.tiering import Tiering
from quire.simulate.clock import Clock
from quire.simulate.runner import TimedRunner, drawn_token
from quire.simulate.store import TimedLoad

FEWEST_STEPS = 2  # one is as quick without


class FastForward:
    """Steps that can be made at once; `make` makes the first of them."""

    def __init__(self, engine: Engine, runner: TimedRunner, clock: Clock, num_steps: int) -> None:
        self._engine, self._runner, self._clock = engine, runner, clock
        running = engine.scheduler.running
        self._tokens = [drawn_token(sequence.seed) for sequence in running]
        starts = np.array([sequence.num_computed for sequence in running], dtype=np.int64)
        self._seconds = runner.costs.decodes(starts, num_steps)
        times = [clock.now, runner.free_at] if engine.overlap else [clock.now]
        ends = np.cumsum(np.concatenate([times[-1:], self._seconds]))
        self._moments = np.concatenate([times[:-1], ends])
        self.begins = self._moments[:num_steps]

    @property
    def num_steps(self) -> int:
        return len(self.begins)

    def moment(self, num_steps: int) -> float:
        """When the next step would begin, after so many."""
        return float(self._moments[num_steps])

    def steps_before(self, moment: float) -> int:
        """How many begin before it."""
        return int(np.searchsorted(self.begins, moment, side="left"))

    def end_before(self, moment: float) -> None:
        """Plan only the steps that begin before it."""
        self.begins = self.begins[: self.steps_before(moment)]

    def make(self, num_steps: int) -> None:
        if num_steps == 0:
            return
        self._clock.now = self.moment(num_steps)
        self._engine.fast_forward(self._tokens, num_steps)
        until = self.moment(num_steps + 1) if self._engine.overlap else self._clock.now
        self._runner.fast_forward(self._seconds[:num_steps].tolist(), until)


def plan_fast_forward(engine: Engine, runner: TimedRunner, clock: Clock) -> FastForward | None:
    """The next steps, if they are all alike."""
    num_steps = engine.steps_alike()
    if num_steps < FEWEST_STEPS:
        return None
    planned = FastForward(engine, runner, clock, num_steps)
    tiering = engine.scheduler.tiering
    if isinstance(tiering, Tiering) and tiering.loading:
        loads = [each.load for each in tiering.loading.values()]
        planned.end_before(min(load.end_at for load in loads if isinstance(load, TimedLoad)))
    return planned if planned.num_steps >= FEWEST_STEPS else None
