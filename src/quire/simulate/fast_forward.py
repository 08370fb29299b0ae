"""Many decode steps in one go, as far as there is nothing to decide in them.

Between an admission, the end of a sequence and the filling of a block, each step does the same:
every sequence computes one token and draws one. A leap knows when each of those steps begins, and
makes as many of them as nobody interrupts. The outcome is, to the last bit, that of single steps.

    without overlap    │ step 1 │ step 2 │ …              begins: now, end of 1, end of 2, …
    with overlap       │ under way │ step 1 │ step 2 │ …  begins: now, its end, end of 1, …
"""

from __future__ import annotations

import numpy as np

from quire.engine.draws.one_token import ONE_TOKEN
from quire.engine.engine import Engine
from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.prefill_rate import FEWEST_TOKENS
from quire.engine.schedule.tiering import Tiering
from quire.engine.sequence import Sequence
from quire.simulate.clock import Clock
from quire.simulate.runner import TimedRunner, TimedStep, drawn_token

FEWEST_STEPS = 2  # one is as quick without


class Leap:
    """Steps that can be made at once; `make` makes the first of them."""

    def __init__(self, engine: Engine, clock: Clock, num_steps: int) -> None:
        runner = engine.runner
        assert isinstance(runner, TimedRunner)
        self._engine, self._clock, self._runner = engine, clock, runner
        self._running = engine.scheduler.running
        starts = np.array([each.num_computed for each in self._running], dtype=np.int64)
        self._seconds = runner.costs.decodes(starts, num_steps)
        times = [clock.now]
        if engine._under_way:
            times.append(_timed(engine).end)
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

    def make(self, num_steps: int) -> None:
        if num_steps == 0:
            return
        engine, scheduler = self._engine, self._engine.scheduler
        self._clock.now = self.moment(num_steps)
        scheduler.step_number += num_steps
        for sequence in self._running:
            _lengthen(sequence, num_steps, scheduler.step_number)
        if engine._under_way:
            _shift(engine._under_way[-1].schedule, num_steps)
            _timed(engine).end = self.moment(num_steps + 1)
        for seconds in self._seconds[:num_steps].tolist():
            self._runner.busy += seconds
        launched_until = num_steps + bool(engine._under_way)
        self._runner.free_at = self.moment(launched_until)
        engine.commit.skip(num_steps, len(self._running))


def find_leap(engine: Engine, clock: Clock) -> Leap | None:
    """The next steps, if they are all alike."""
    num_steps = _steps_alike(engine)
    if num_steps < FEWEST_STEPS:
        return None
    leap = Leap(engine, clock, num_steps)
    tiering = engine.scheduler.tiering
    if isinstance(tiering, Tiering) and tiering.loading:
        ends = min(each.load.end_at for each in tiering.loading.values())  # type: ignore[attr-defined]
        leap.begins = leap.begins[: leap.steps_before(ends)]
    return leap if leap.num_steps >= FEWEST_STEPS else None


def _steps_alike(engine: Engine) -> int:
    scheduler = engine.scheduler
    running = scheduler.running
    if not running or scheduler.waiting or scheduler.watch._starting:
        return 0
    if len(running) > min(scheduler.budget, FEWEST_TOKENS - 1):
        return 0  # they take turns, or their steps count as prompts' pace
    if engine.overlap and not _is_steady(engine):
        return 0
    return min(_steps_of(sequence, engine) for sequence in running)


def _is_steady(engine: Engine) -> bool:
    """Whether the step under way is a decode of all that run."""
    if len(engine._under_way) != 1:
        return False
    chunks = engine._under_way[0].schedule.chunks
    drawn = [chunk.sequence for chunk in chunks if chunk.count == 1 and chunk.draw is ONE_TOKEN]
    return len(drawn) == len(chunks) and drawn == engine.scheduler.running


def _steps_of(sequence: Sequence, engine: Engine) -> int:
    """How many steps it goes on in the block it has, behind which it neither ends nor publishes."""
    table, request, count = sequence.table, sequence.request, sequence.tokens.count
    assert table is not None
    if sequence.remaining != 1:
        return 0
    cache = engine.scheduler.cache
    if cache.enabled and engine.scheduler.prefixes.publishable(sequence, sequence.num_computed):
        return 0
    until_end = request.max_tokens + sequence.prompt_len - count - 1
    return min(table.room - 1, until_end)


def _lengthen(sequence: Sequence, num_steps: int, step: int) -> None:
    token = drawn_token(sequence.seed)
    sequence.tokens.extend(np.full(num_steps, token, dtype=np.int32))
    sequence.num_computed += num_steps
    sequence.last_step = step
    assert sequence.table is not None
    sequence.table.append(num_steps)


def _shift(schedule: Schedule, num_steps: int) -> None:
    """The last step of a leap is the one under way, so many steps later."""
    schedule.number += num_steps
    for chunk in schedule.chunks:
        chunk.start += num_steps


def _timed(engine: Engine) -> TimedStep:
    launched = engine._under_way[-1].launched
    assert isinstance(launched, TimedStep)
    return launched
