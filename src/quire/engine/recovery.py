"""Runs planned steps and survives those that fail.

out of memory      take the step back, give memory up, plan less; plan more again when it holds
another failure    take it back and try again; a second time, split the step in halves until
                   the request that breaks it stands alone, and end that one
a lost rank        nothing can be computed any more: `EngineFailed` goes through to the caller

A step can be planned and launched while the one before is under way. After a failure steps go one
at a time until one has succeeded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.schedule.step_plan import step_plan
from quire.engine.sequence import Sequence
from quire.errors import EngineFailed, in_one_sentence
from quire.kv.table import BlockCopy
from quire.runner.plan import StepPlan, StepResult
from quire.runner.sampling.masks import TokenMasks
from quire.runner.sampling.sampler import BadLogits

log = logging.getLogger("quire")

STEPS_BEFORE_GROWING = 16  # good steps before the budget is doubled again
WAITS_FOR_MEMORY = 6  # at the smallest step, before the request is given up
FIRST_WAIT_S = 0.02


class Launched(Protocol):
    def draw(self, masks: TokenMasks | None) -> None: ...
    def result(self) -> StepResult: ...


class Runner(Protocol):
    """What the engine needs of the object that computes its steps."""

    def copy_blocks(self, copies: list[BlockCopy]) -> None: ...
    def launch(self, plan: StepPlan) -> Launched: ...
    def free_memory(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class StepUnderWay:
    """A step that was launched, or could not be; then it fails when its turn to finish comes."""

    schedule: Schedule
    launched: Launched | Exception
    copied: bool = True  # its block copies were made
    awaits_masks: bool = False  # nothing is drawn until `Recovery.draw`

    @property
    def is_running(self) -> bool:
        return not isinstance(self.launched, Exception)


class StepFailed(Exception):
    """A step that has to be taken back, and why."""

    def __init__(self, step: StepUnderWay, cause: Exception) -> None:
        super().__init__(str(cause))
        self.step = step
        self.cause = cause


class Recovery:
    """Between the scheduler and the runner: a step is either done or as if never planned."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.num_out_of_memory = 0
        self.num_failures = 0
        self._failed_before = False
        self._groups: list[list[Sequence]] = []  # suspects, tried from the last group on
        self._broken: list[tuple[Sequence, str]] = []
        self._good_steps = 0
        self._waits = 0

    @property
    def suspects(self) -> list[Sequence] | None:
        """Only these may be planned next; None: all."""
        return self._groups[-1] if self._groups else None

    def take_broken(self) -> list[tuple[Sequence, str]]:
        """Sequences that cannot be computed, and why."""
        broken, self._broken = self._broken, []
        return broken

    @property
    def is_careful(self) -> bool:
        """Whether steps have to go one at a time."""
        return self._failed_before or bool(self._groups) or self._waits > 0

    def launch(self, schedule: Schedule, before: StepUnderWay | None) -> StepUnderWay | None:
        """Begin a step behind the one under way; None if there is nothing to do."""
        if not schedule.chunks:
            self.scheduler.rollback(schedule, copied=False)
            if before is None:
                self._groups = self._groups[:-1]  # none of these suspects can be planned any more
            return None
        copied = False
        try:
            self.runner.copy_blocks(schedule.copies)
            copied = True
            plan = step_plan(schedule, before.schedule if before is not None else None)
            plan = self.scheduler.slots.load(schedule, plan)
            launched = self.runner.launch(plan)
            return StepUnderWay(schedule, launched, awaits_masks=plan.is_masked)
        except EngineFailed:
            raise
        except Exception as error:
            return StepUnderWay(schedule, error, copied)

    def draw(
        self, step: StepUnderWay, masks: Callable[[Schedule], TokenMasks | None]
    ) -> StepUnderWay:
        """Let a launched step draw, now that what came before it is known."""
        if isinstance(step.launched, Exception):
            return step
        try:
            step.launched.draw(masks(step.schedule))
        except EngineFailed:
            raise
        except Exception as error:
            return StepUnderWay(step.schedule, error)
        return replace(step, awaits_masks=False)

    def finish(self, step: StepUnderWay) -> StepResult:
        """Wait for a step."""
        if isinstance(step.launched, Exception):
            raise StepFailed(step, step.launched)
        try:
            result = step.launched.result()
        except EngineFailed:
            raise
        except Exception as error:
            raise StepFailed(step, error) from error
        self._succeeded()
        return result

    def take_back(self, failed: StepFailed, others: list[Sequence] | None = None) -> None:
        """Plan as if the step had never been, and decide what to do differently.

        `others`: all unfinished sequences, where a later step was built on this one. They begin
        again from the tokens they have: what either step published may not be there.
        """
        error, schedule = failed.cause, failed.step.schedule
        culprits = _culprits(error, schedule)
        if others is None:
            self.scheduler.rollback(schedule, failed.step.copied)
        else:
            self.scheduler.reset(others)
        if _is_out_of_memory(error):
            self._out_of_memory(schedule)
        elif culprits:
            reason = "The model gave no usable logits (NaN or infinite) for this request."
            self._broken += [(sequence, reason) for sequence in culprits]
        else:
            self._failed(schedule, error)

    def _succeeded(self) -> None:
        self._failed_before = False
        self._groups = self._groups[:-1]
        self._waits = 0
        self._good_steps += 1
        scheduler = self.scheduler
        if scheduler.budget < scheduler.max_budget and self._good_steps >= STEPS_BEFORE_GROWING:
            scheduler.budget = min(2 * scheduler.budget, scheduler.max_budget)
            self._good_steps = 0

    def _out_of_memory(self, schedule: Schedule) -> None:
        self.num_out_of_memory += 1
        self._good_steps = 0
        self.runner.free_memory()
        if schedule.num_tokens > 1:
            self.scheduler.budget = max(1, schedule.num_tokens // 2)
            self.scheduler.queues.preempt_youngest()
        elif self._waits < WAITS_FOR_MEMORY:
            time.sleep(FIRST_WAIT_S * 2**self._waits)
            self._waits += 1
        else:
            self._waits = 0
            reason = (
                "The device is out of memory even for one token; free some or use a smaller pool."
            )
            self._broken += [(chunk.sequence, reason) for chunk in schedule.chunks]

    def _failed(self, schedule: Schedule, error: Exception) -> None:
        self.num_failures += 1
        if not self._failed_before:
            self._failed_before = True
            return
        self._groups = self._groups[:-1]
        group = [chunk.sequence for chunk in schedule.chunks]
        if len(group) == 1:
            log.error("A step of one request failed twice.", exc_info=error)
            reason = in_one_sentence(error, "The step of this request")
            self._broken.append((group[0], reason))
        else:
            half = len(group) // 2
            self._groups += [group[half:], group[:half]]


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _culprits(error: Exception, schedule: Schedule) -> list[Sequence]:
    """The sequences whose logits were no numbers, where the error names its rows."""
    if not isinstance(error, BadLogits):
        return []
    drawn = [c.sequence for c in schedule.chunks for _ in range(c.draw.count)]
    return list(dict.fromkeys(drawn[row] for row in error.rows))
