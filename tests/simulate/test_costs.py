"""How long steps take: against the formulas, and against what was measured on the H200."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from simulated import H200, SMALL, costs

from quire.bench.engine.workloads import nano
from quire.bench.report.machine_rates import Rates
from quire.bench.report.roofline import Roofline
from quire.models.checkpoints.dummy import SHAPES
from quire.models.held import item_sizes
from quire.models.hf_config import read_hf_config
from quire.simulate.costs import StepCosts
from quire.simulate.fleet import Fleet, Setup
from quire.simulate.trace import Trace

LARGE = read_hf_config(SHAPES["qwen3-8b"])
IN_MXFP4 = read_hf_config(SHAPES["gpt-oss-20b"])
WINDOWED = replace(SMALL, windows=(64, None) * 14)
SHARP = {"bend": 200.0, "step": 0.0, "prompt": 0.0, "draw": 0.0}


def lengths(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("config", [SMALL, LARGE, WINDOWED])
def test_a_prompt_is_its_operations(config):
    found = costs(config, matrix=1e15, attention=1e15, **SHARP)
    limit = Roofline(config, Rates(1e12, 1e15), 2, 2)
    operations = limit._operations([(1000, 9000)]) / 1e15
    head = 2 * config.vocab_size * config.hidden_size / 1e15
    assert found.seconds(lengths(1000), lengths(8000), 1) == pytest.approx(operations + head)


@pytest.mark.parametrize("config", [SMALL, LARGE, WINDOWED, IN_MXFP4])
def test_a_decode_is_weights_and_kv(config):
    found = costs(config, weights=1e12, kv=1e12, **SHARP)
    sizes = item_sizes(config, torch.bfloat16)
    roofline = Roofline(config, Rates(1e12, H200.matrix), 2, 2, sizes.experts)
    limit = roofline.cached_prompt(4096).seconds
    assert found.seconds(lengths(4095), lengths(1), 1) == pytest.approx(limit)


def test_experts_in_four_bits_take_the_memory_of_four_bits():
    """As `quire info` says it, but for norms and biases."""
    assert costs(IN_MXFP4).weight_bytes == pytest.approx(12.8 * 2**30, rel=2e-3)


def test_what_is_fixed_is_added():
    bare = costs(**SHARP).seconds(lengths(7, 9), lengths(1, 1), 2)
    dear = costs(**SHARP | {"step": 1.0, "draw": 0.1, "prompt": 10.0})
    assert dear.seconds(lengths(7, 9), lengths(1, 1), 2) == pytest.approx(bare + 1.2)
    assert dear.seconds(lengths(7), lengths(64), 0) > 11


@pytest.mark.parametrize("config", [SMALL, WINDOWED])
def test_steps_together_are_those_one_by_one(config):
    """To the last bit: the fast-forward depends on it."""
    found, starts = costs(config), lengths(3, 500, 62, 9000)
    together = found.decodes(starts, 40)
    alone = [found.seconds(starts + i, lengths(1, 1, 1, 1), 4) for i in range(40)]
    assert together.tolist() == alone


def test_more_is_never_faster():
    found = costs(LARGE)
    rows = [found.seconds(np.full(n, 100), np.ones(n, np.int64), n) for n in (1, 2, 8, 64, 256)]
    contexts = [found.seconds(lengths(n), lengths(1), 1) for n in (1, 1000, 100_000)]
    prompts = [found.seconds(lengths(0), lengths(n), 1) for n in (17, 512, 8192)]
    for series in (rows, contexts, prompts):
        assert series == sorted(series) and len(set(series)) == len(series)


# What docs/benchmarks.md has: ms until a prompt's first token, and for one more.
@pytest.mark.parametrize(
    ("config", "chunks", "measured"),
    [
        (LARGE, [(640, 1)], 4.08),
        (SMALL, [(640, 1)], 0.774),
        (LARGE, [(0, 512)], 12.35),
        (LARGE, [(0, 8192)], 209.3),
        (LARGE, [(0, 16_384), (16_384, 16_384)], 1239),
        (SMALL, [(0, 16_384), (16_384, 16_384)], 264.6),
    ],
)
def test_the_h200_is_as_fast_as_it_was_measured(config, chunks, measured):
    found = [costs(config).seconds(lengths(start), lengths(num), 1) for start, num in chunks]
    assert 1e3 * sum(found) == pytest.approx(measured, rel=0.07)


def test_a_batch_on_the_h200_is_as_fast_as_it_was_measured():
    """`nano` on 8B shapes: 9,722 tokens/s. It was fitted to that; a change must not lose it."""
    trace = Trace()
    for num_in, num_out in nano().lengths:
        trace.add(0.0, [], num_in, num_out)
    fleet = Fleet(Setup(1, 700, 512, router="random"), StepCosts(LARGE, H200))
    answered = fleet.run(trace.replay())
    speed = sum(each.num_out for each in answered) / max(each.ended for each in answered)
    assert speed == pytest.approx(9722, rel=0.05)
