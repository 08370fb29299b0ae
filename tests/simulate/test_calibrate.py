"""Rates from timed steps: what made the times is found again, and an engine's steps are read."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from simulated import H200, SMALL
from tiny_llm import open_tiny, write_config

from quire.simulate.calibrate import FITTED, TimedSample, fit, timed_steps
from quire.simulate.check import run_real
from quire.simulate.costs import StepCosts
from quire.simulate.trace import random_trace


def samples_of(costs, shapes):
    found = []
    for starts, counts in shapes:
        starts, counts = np.array(starts, np.int64), np.array(counts, np.int64)
        seconds = costs.seconds(starts, counts, len(counts))
        found.append(TimedSample(starts, counts, len(counts), seconds))
    return found


def test_what_made_the_times_is_found_again():
    """Not each constant, for several can say the same, but how long other steps take."""
    machine = replace(
        H200, weights=2e10, matrix=5e10, kv=1e10, attention=4e10, step=2e-3, draw=1e-4
    )
    costs = StepCosts(SMALL, machine)
    shown = [([0], [n]) for n in (17, 64, 256, 1024)]
    shown += [([c] * n, [1] * n) for n in (1, 4, 16) for c in (20, 900)]
    start = replace(machine, **dict.fromkeys(FITTED[:4], 1e11))
    found = StepCosts(SMALL, fit(samples_of(costs, shown), SMALL, start, 2))
    for starts, counts in [([0], [500]), ([300] * 8, [1] * 8), ([50, 0], [1, 128])]:
        wanted = samples_of(costs, [(starts, counts)])[0]
        got = found.seconds(wanted.starts, wanted.counts, len(counts))
        assert got == pytest.approx(wanted.seconds, rel=0.1)


def test_what_no_constant_says_is_kept_by_the_tokens():
    """One token has a kernel of its own, two have the slowest of all."""
    machine = replace(H200, step=1e-4, curve=((1, 0.7), (2, 1.3), (4, 1.0), (4096, 1.0)))
    costs = StepCosts(SMALL, machine)
    shown = [([c] * n, [1] * n) for n in (1, 2, 4, 8, 16) for c in (20, 900)]
    shown += [([0], [n]) for n in (32, 64, 128, 256, 512, 1024)]
    found = StepCosts(SMALL, fit(samples_of(costs, shown), SMALL, H200, 2))
    for starts in ([300], [300, 20], [300] * 4):
        ones = np.ones(len(starts), np.int64)
        starts = np.array(starts, np.int64)
        wanted = costs.seconds(starts, ones, len(ones))
        assert found.seconds(starts, ones, len(ones)) == pytest.approx(wanted, rel=0.05)
        assert found.decodes(starts, 3)[0] == found.seconds(starts, ones, len(ones))


def test_an_engine_is_timed_and_answers_a_trace_when_it_is_due(tmp_path):
    ticks = itertools.count()
    with open_tiny(write_config(tmp_path / "tiny", max_position_embeddings=2048), "cpu") as llm:
        runner = llm.engine.recovery.runner
        samples = timed_steps(llm.engine, lambda: float(next(ticks)), rounds=1)
        assert llm.engine.recovery.runner is runner
        found = run_real(llm.engine, random_trace(6, 1.0, seed=0), lambda: 0.05 * next(ticks))
    assert {1, 2, 4, 8, 16} <= {len(each.counts) for each in samples}
    assert all(each.seconds == 1.0 for each in samples)
    assert found.speed > 0 and 0 < found.median < 100
