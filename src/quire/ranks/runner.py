"""The runner of rank 0: all ranks do what the engine asks of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np

from quire.errors import ModelError
from quire.kv.table import BlockCopy
from quire.ranks.leader import Ranks
from quire.ranks.wire import step_message
from quire.runner.plan import AdapterInfo, StepPlan, StepResult
from quire.runner.runner import LaunchedStep, ModelRunner


@dataclass
class LeadingStep(LaunchedStep):
    """A step under way on all ranks; its draws are rank 0's alone."""

    ranks: Ranks = field(kw_only=True)

    def result(self) -> StepResult:
        with self.ranks.watching("waiting for a step"):
            return super().result()


class LeadingRunner(ModelRunner):
    """Sends each step to the other ranks, then launches it on rank 0."""

    def __init__(self, own: ModelRunner, ranks: Ranks) -> None:
        super().__init__(
            own.model,
            own.cache,
            own.graphs,
            own.clock,
            own.link,
            draft_layer=own.draft_layer,
            adapters=own.adapters,
        )
        self.ranks = ranks
        self._reading = threading.Lock()

    def launch(self, plan: StepPlan) -> LeadingStep:
        sequences = f"{len(plan.counts)} sequence{'s' * (len(plan.counts) != 1)}"
        what = f"a step of {plan.num_tokens} tokens of {sequences}"
        with _uninterrupted(), self.ranks.together(what):
            num_drawn = self.num_drawn
            self.ranks.tell(*step_message(plan, num_drawn))
            if len(plan.fed_rows):
                self.share_drawn(num_drawn)
            return LeadingStep(**vars(super().launch(plan)), ranks=self.ranks)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        if copies:
            with _uninterrupted(), self.ranks.together("copying blocks"):
                self.ranks.tell({"do": "copy_blocks"}, [np.array(copies, dtype=np.int64)])
                super().copy_blocks(copies)

    def read_adapter(self, path: str) -> AdapterInfo:
        """Rank 0 reads and checks it first; then the others find what it has found."""
        info = super().read_adapter(path)
        with self._reading:  # others may be read at the same time, and answers have no names
            answers = self.ranks.read_adapter(path)
        for rank, said in enumerate(answers, start=1):
            if said.get("fingerprint") != info.fingerprint:
                why = said.get("failed", "it has changed meanwhile")
                raise ModelError(f"Rank {rank} cannot read the adapter in {path}: {why}")
        return info

    def forget_adapter(self, fingerprint: str) -> None:
        self.ranks.tell({"do": "forget_adapter", "fingerprint": fingerprint})
        super().forget_adapter(fingerprint)

    def load_adapter(self, fingerprint: str, slot: int) -> None:
        with _uninterrupted(), self.ranks.together("loading an adapter"):
            self.ranks.tell({"do": "load_adapter", "fingerprint": fingerprint, "slot": slot})
            super().load_adapter(fingerprint, slot)

    def free_memory(self) -> None:
        self.ranks.tell({"do": "free_memory"})
        super().free_memory()

    def check(self) -> None:
        self.ranks.check()

    def close(self) -> None:
        self.ranks.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep an interrupt for later: rank 0 may not leave the others in the middle of a step.

    A second one goes through, and ends the engine.
    """
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            usual(number, frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        usual(*came[0])
