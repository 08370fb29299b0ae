"""The runner of rank 0: whatever the engine asks for, all ranks do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np

from quire.kv.table import BlockCopy
from quire.ranks.leader import Ranks
from quire.ranks.wire import step_message
from quire.runner.masks import TokenMasks
from quire.runner.plan import StepPlan, StepResult
from quire.runner.runner import LaunchedStep, ModelRunner


class LeadingStep:
    """A step under way on all ranks; its draws are rank 0's alone."""

    def __init__(self, step: LaunchedStep, ranks: Ranks) -> None:
        self._step = step
        self._ranks = ranks

    def draw(self, masks: TokenMasks) -> None:
        self._step.draw(masks)

    def result(self) -> StepResult:
        with self._ranks.watching("waiting for a step"):
            return self._step.result()


class LeadingRunner:
    def __init__(self, own: ModelRunner, ranks: Ranks) -> None:
        self.own = own
        self.ranks = ranks

    def launch(self, plan: StepPlan) -> LeadingStep:
        sequences = f"{len(plan.counts)} sequence{'s' * (len(plan.counts) != 1)}"
        what = f"a step of {plan.num_tokens} tokens of {sequences}"
        with _uninterrupted(), self.ranks.together(what):
            num_drawn = self.own.num_drawn
            self.ranks.tell(*step_message(plan, num_drawn))
            if len(plan.fed_rows):
                self.own.share_drawn(num_drawn)
            return LeadingStep(self.own.launch(plan), self.ranks)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        if copies:
            with _uninterrupted(), self.ranks.together("copying blocks"):
                self.ranks.tell({"do": "copy_blocks"}, [np.array(copies, dtype=np.int64)])
                self.own.copy_blocks(copies)

    def free_memory(self) -> None:
        self.ranks.tell({"do": "free_memory"})
        self.own.free_memory()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep an interrupt for later: rank 0 may not leave the others in the middle of a step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came and callable(usual):
        usual(*came[0])
