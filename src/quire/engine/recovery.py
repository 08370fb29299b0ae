"""Runs planned steps and survives those that fail.

out of memory      take the step back, give memory up, plan less; plan more again when it holds
another failure    take it back and try again; a second time, split the step in halves until
                   the request that breaks it stands alone, and end that one
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from quire.engine.scheduler import Schedule, Scheduler
from quire.engine.sequence import Sequence
from quire.engine.step import step_plan
from quire.kv.table import BlockCopy
from quire.runner.plan import StepPlan, StepResult
from quire.runner.sampler import BadLogits

STEPS_BEFORE_GROWING = 16  # good steps before the budget is doubled again
WAITS_FOR_MEMORY = 6  # at the smallest step, before the request is given up
FIRST_WAIT_S = 0.02


class Launched(Protocol):
    def result(self) -> StepResult: ...


class Runner(Protocol):
    """What the engine needs of whoever computes its steps."""

    def copy_blocks(self, copies: list[BlockCopy]) -> None: ...
    def launch(self, plan: StepPlan) -> Launched: ...
    def free_memory(self) -> None: ...


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

    def run(self, schedule: Schedule) -> StepResult | None:
        """Compute the step; None if it failed and was taken back."""
        if not schedule.chunks:
            self.scheduler.rollback(schedule, copied=False)
            self._groups = self._groups[:-1]  # none of these suspects can be planned any more
            return None
        copied = False
        try:
            self.runner.copy_blocks(schedule.copies)
            copied = True
            result = self.runner.launch(step_plan(schedule)).result()
        except BaseException as error:
            culprits = _culprits(error, schedule)
            self.scheduler.rollback(schedule, copied)
            if not isinstance(error, Exception):
                raise  # an interrupt: nothing is half done, the caller may go on or abort
            if _is_out_of_memory(error):
                self._out_of_memory(schedule)
            elif culprits:
                reason = "The model gave no usable logits (NaN or infinite) for this request."
                self._broken += [(sequence, reason) for sequence in culprits]
            else:
                self._failed(schedule, error)
            return None
        self._succeeded()
        return result

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
            self.scheduler.preempt_youngest()
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
            reason = f"The step failed twice: {type(error).__name__}: {error}"
            self._broken.append((group[0], reason))
        else:
            half = len(group) // 2
            self._groups += [group[half:], group[:half]]


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _culprits(error: BaseException, schedule: Schedule) -> list[Sequence]:
    """The sequences whose logits were no numbers, where the error names its rows."""
    if not isinstance(error, BadLogits):
        return []
    drawn = [c.sequence for c in schedule.chunks for _ in range(c.num_samples)]
    return list(dict.fromkeys(drawn[row] for row in error.rows))
