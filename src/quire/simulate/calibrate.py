"""A machine's rates from steps that a real engine made on it.

Steps of many kinds are timed: prompts of several lengths alone, batches of several sizes that
decode, and both together. The constants of `costs.py` are those with which its formula comes
nearest to all of them; what it still misses is kept by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.engine import Engine
from quire.engine.recovery import Launched
from quire.models.config import ModelConfig
from quire.params import SamplingParams
from quire.runner.plan import StepPlan
from quire.simulate.costs import Lengths, StepCosts
from quire.simulate.machine import Machine

PROMPTS = (17, 32, 64, 128, 256, 512)
LATE = ((2, 64), (4, 400), (8, 128))  # a batch that decodes, and a prompt that comes meanwhile
BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (24, 400)
DECODES = 5  # steps of each batch
FITTED = ("weights", "matrix", "kv", "attention", "step", "prompt", "draw", "bend")
FACTORS = (4.0, 2.0, 1.4, 1.15, 1.05, 1.02)


@dataclass(frozen=True)
class TimedSample:
    """One step: what it computed, and how long that took, planning and all."""

    starts: Lengths
    counts: Lengths
    draws: int
    seconds: float


class StepRecorder:
    """Makes an engine's steps and keeps what each computed."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.samples: list[TimedSample] = []
        self._clock = clock
        self._runner: Any = engine.recovery.runner
        self._plan: StepPlan | None = None
        engine.recovery.runner = self

    def launch(self, plan: StepPlan) -> Launched:
        self._plan = plan
        launched: Launched = self._runner.launch(plan)
        return launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self) -> None:
        self._plan = None
        started = self._clock()
        self.engine.step()
        seconds = self._clock() - started
        if self._plan is not None:
            starts, counts = (
                np.asarray(a, np.int64) for a in (self._plan.starts, self._plan.counts)
            )
            self.samples.append(TimedSample(starts, counts, len(self._plan.samples), seconds))

    def close(self) -> None:
        self.engine.recovery.runner = self._runner


def timed_steps(engine: Engine, clock: Callable[[], float], rounds: int = 2) -> list[TimedSample]:
    """Steps of all kinds, a round to warm up not counted."""
    recorder = StepRecorder(engine, clock)
    for turn in range(rounds + 1):
        for length in PROMPTS:
            _run(recorder, [length], 1, turn)
        for batch in BATCHES:
            for context in CONTEXTS:
                _run(recorder, [context] * batch, DECODES, turn)
        for batch, late in LATE:
            _run(recorder, [CONTEXTS[-1]] * batch, DECODES, turn, late)
        if turn == 0:
            recorder.samples.clear()
    recorder.close()
    return recorder.samples


def _run(
    recorder: StepRecorder, lengths: list[int], num_out: int, seed: int, late: int | None = None
) -> None:
    engine, r = recorder.engine, np.random.default_rng([seed, num_out, *lengths])
    params = SamplingParams(max_tokens=num_out, ignore_eos=True)

    def submit(length: int) -> None:
        ids = r.integers(0, engine.vocab_size, length, dtype=np.int32)
        engine.submit(engine.make_request(f"timed {r.random()}", ids, params))

    for length in lengths:
        submit(length)
    recorder.step()
    if late is not None:
        submit(late)
    while engine.has_unfinished_requests():
        recorder.step()


def fit(
    samples: list[TimedSample], config: ModelConfig, machine: Machine, itemsize: int
) -> Machine:
    """The constants that come nearest to all, and a curve for what they leave over."""
    measured = np.array([each.seconds for each in samples])

    def left_over(candidate: Machine) -> npt.NDArray[np.float64]:
        costs = StepCosts(config, candidate, itemsize)
        found = [costs.seconds(each.starts, each.counts, each.draws) for each in samples]
        ratios: npt.NDArray[np.float64] = measured / np.array(found)
        return ratios

    def error(candidate: Machine) -> float:
        return float(np.abs(np.log(left_over(candidate))).mean())

    least = float(measured.min())
    machine = replace(machine, step=least / 4, prompt=least / 10, draw=least / 100, bend=2.0)
    machine = _descend(replace(machine, curve=()), error)
    return replace(machine, curve=_curve(samples, left_over(machine)))


def _descend(machine: Machine, error: Callable[[Machine], float]) -> Machine:
    """Change one constant after the other, by smaller and smaller factors, as long as it helps."""
    best = error(machine)
    for factor in FACTORS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for change in (factor, 1 / factor):
                    trial = replace(machine, **{name: getattr(machine, name) * change})
                    if 1 <= trial.bend <= 16 and (found := error(trial)) < best - 1e-5:
                        machine, best, improved = trial, found, True
    return machine


def _curve(
    samples: list[TimedSample], ratios: npt.NDArray[np.float64]
) -> tuple[tuple[float, float], ...]:
    """One point for each power of two that a sample's tokens are near: their middle, its median."""
    tokens = np.array([each.counts.sum() for each in samples], np.float64)
    powers = np.round(np.log2(tokens))
    near = [powers == power for power in np.unique(powers)]
    return tuple(
        (float(np.exp(np.log(tokens[those]).mean())), float(np.median(ratios[those])))
        for those in near
    )
