"""A machine's rates from steps that a real engine made on it.

Steps of many kinds are timed: prompts of several lengths alone, new and behind a prefix that is
cached, batches of several sizes that decode, and both together. The constants of `costs.py` are
those with which its formula comes nearest to all of them; what it still misses is kept by the
number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
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

PROMPTS = (17, 32, 64, 128, 256, 512, 1024)
PREFIX, BEHIND = 512, (32, 64, 128, 256)
LATE = ((2, 64), (4, 400), (8, 128))  # a batch that decodes, and a prompt that comes meanwhile
BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (24, 400)
DECODES = 5  # steps of each batch
FITTED = ("weights", "matrix", "kv", "attention", "step", "prompt", "draw", "bend")
FACTORS = (4.0, 2.0, 1.4, 1.15, 1.05, 1.02)
LARGEST_SEED = 2**31  # of no round
Ids = npt.NDArray[np.int32]
_NUMBERS = count()


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


def timed_steps(engine: Engine, clock: Callable[[], float], rounds: int = 4) -> list[TimedSample]:
    """Steps of all kinds, a round to warm up not counted; of those that are alike, the median."""
    recorder = StepRecorder(engine, clock)
    for turn in range(rounds + 1):
        for length in PROMPTS:
            _run(recorder, [_ids(engine, length, turn)], 1)
        for length in BEHIND:
            ids = _ids(engine, PREFIX + length, turn)
            _run(recorder, [ids[:PREFIX]], 1)
            _run(recorder, [ids], 1)
        for batch in BATCHES:
            for context in CONTEXTS:
                _run(recorder, _cached(engine, context, batch), DECODES)
        for batch, late in LATE:
            waits = _cached(engine, CONTEXTS[-1], batch)
            _run(recorder, waits, DECODES, _ids(engine, late, turn, batch))
        if turn == 0:
            recorder.samples.clear()
    recorder.close()
    return _medians(recorder.samples)


def _medians(samples: list[TimedSample]) -> list[TimedSample]:
    alike: dict[tuple[int, ...], list[TimedSample]] = {}
    for each in samples:
        alike.setdefault((each.draws, *each.starts, *each.counts), []).append(each)
    return [
        replace(some[0], seconds=float(np.median([each.seconds for each in some])))
        for some in alike.values()
    ]


def _run(recorder: StepRecorder, prompts: list[Ids], num_out: int, late: Ids | None = None) -> None:
    for ids in prompts:
        _submit(recorder.engine, ids, num_out)
    recorder.step()
    if late is not None:
        _submit(recorder.engine, late, num_out)
    while recorder.engine.has_unfinished_requests():
        recorder.step()


def _ids(engine: Engine, length: int, *seed: int) -> Ids:
    r = np.random.default_rng([length, *seed])
    return r.integers(0, engine.model.vocab_size, length, dtype=np.int32)


def _cached(engine: Engine, length: int, batch: int) -> list[Ids]:
    """Prompts that the first round has computed: after it, only their decodes take time."""
    return [_ids(engine, length, LARGEST_SEED, number) for number in range(batch)]


def _submit(engine: Engine, ids: Ids, num_out: int) -> None:
    params = SamplingParams(max_tokens=num_out, ignore_eos=True)
    engine.submit(engine.make_request(f"timed {next(_NUMBERS)}", ids, params))


def fit(
    samples: list[TimedSample], config: ModelConfig, machine: Machine, itemsize: int
) -> Machine:
    """The constants that come nearest to all, and a curve for what they leave over."""
    measured = np.array([each.seconds for each in samples])
    powers = _powers(samples)
    _, kind, number = np.unique(powers, return_inverse=True, return_counts=True)
    weights = 1 / number[kind]  # steps of few tokens, of which there are many, count no more

    def left_over(candidate: Machine) -> npt.NDArray[np.float64]:
        costs = StepCosts(config, candidate, itemsize)
        found = [costs.seconds(each.starts, each.counts, each.draws) for each in samples]
        ratios: npt.NDArray[np.float64] = measured / np.array(found)
        return ratios

    def error(candidate: Machine) -> float:
        return float(np.average(np.abs(np.log(left_over(candidate))), weights=weights))

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
    tokens, powers = _tokens(samples), _powers(samples)
    near = [powers == power for power in np.unique(powers)]
    return tuple(
        (float(np.exp(np.log(tokens[those]).mean())), float(np.median(ratios[those])))
        for those in near
    )


def _powers(samples: list[TimedSample]) -> npt.NDArray[np.float64]:
    """The power of two that is nearest to each sample's tokens."""
    return np.rint(np.log2(_tokens(samples)))


def _tokens(samples: list[TimedSample]) -> npt.NDArray[np.float64]:
    return np.array([each.counts.sum() for each in samples], np.float64)
