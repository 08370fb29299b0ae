"""A runner in place of the device's: it computes nothing, and says how long a step takes."""

from __future__ import annotations

import numpy as np

from quire.kv.table import BlockCopy
from quire.runner.plan import StepPlan, StepResult
from quire.runner.sampling.masks import TokenMasks
from quire.simulate.clock import Clock
from quire.simulate.costs import StepCosts

FIRST_DRAWN = 1 << 30  # token ids from here on are drawn, those below are in prompts


def drawn_token(seed: int) -> int:
    """All that a sequence draws; one with another seed draws something else."""
    return FIRST_DRAWN | seed & FIRST_DRAWN - 1


class TimedStep:
    """A step that ends at some moment; its result moves the clock there."""

    def __init__(self, clock: Clock, end: float, tokens: list[int]) -> None:
        self.end = end
        self._clock = clock
        self._tokens = tokens

    def draw(self, masks: TokenMasks | None) -> None:
        raise NotImplementedError("no request of a trace asks for a form of output")

    def result(self) -> StepResult:
        self._clock.now = max(self._clock.now, self.end)
        return StepResult(self._tokens, [None] * len(self._tokens), [])


class TimedRunner:
    """Steps one behind the other, each as long as `costs` say."""

    def __init__(self, clock: Clock, costs: StepCosts) -> None:
        self.costs = costs
        self.busy = 0.0  # seconds in which a step ran
        self.prompts = 0.0  # of those, what parts of prompts added
        self.free_at = 0.0  # when the last step ends
        self._clock = clock
        self._last: TimedStep | None = None

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copies within the device take no simulated time."""

    def free_memory(self) -> None:
        raise NotImplementedError("a device without memory cannot be out of it")

    def check(self) -> None:
        """A simulated device does not fail."""

    def close(self) -> None:
        """Nothing lasts longer than the engine."""

    def launch(self, plan: StepPlan) -> TimedStep:
        starts, counts = plan.starts.astype(np.int64), plan.counts.astype(np.int64)
        seconds = self.costs.seconds(starts, counts, len(plan.samples))
        begin = max(self._clock.now, self.free_at)
        self.free_at = begin + seconds
        self.busy += seconds
        if len(plan.token_ids) > len(counts):
            self.prompts += seconds - self._without_prompts(starts, counts)
        tokens = [drawn_token(row.seed) for row in plan.samples]
        self._last = TimedStep(self._clock, self.free_at, tokens)
        return self._last

    def fast_forward(self, seconds: list[float], until: float) -> None:
        """Steps that take `seconds` follow the last one; the last of them ends at `until`."""
        for each in seconds:
            self.busy += each
        self.free_at = until
        if self._last is not None:
            self._last.end = until

    def _without_prompts(self, starts: np.ndarray, counts: np.ndarray) -> float:
        """What the step would have taken with its decodes alone."""
        decodes = starts[counts == 1]
        if not len(decodes):
            return 0.0
        return float(self.costs.decodes(decodes, 1)[0])
