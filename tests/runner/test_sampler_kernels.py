"""The GPU's way of drawing against the CPU's, which has its own, slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from effort import effort

pytest.importorskip("triton")

from quire.kernels.triton.sampling import filter_thresholds, sample
from quire.params import SamplingParams
from quire.runner.sampling.sampler import Sampler, SampleRow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLER = Sampler()
ASKED = [
    {},
    {"temperature": 0},
    {"temperature": 1e-9},  # as good as 0
    {"temperature": 0.3},
    {"temperature": 20.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 90},
    {"top_p": 0.5},
    {"top_p": 0.98, "temperature": 1.7},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 3, "top_p": 0.99, "min_p": 0.3, "temperature": 0.7},
    {"repetition_penalty": 1.3, "logit_bias": {3: 2.0}},
    {"temperature": 0, "presence_penalty": 1.5},
]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Several stretches even in a small vocabulary, none of which divides it."""
    monkeypatch.setattr(sample, "STRETCH", 64)
    monkeypatch.setattr(filter_thresholds, "WIDTH", 128)


def draw_both_ways(logits: torch.Tensor, rows: list[SampleRow]) -> tuple[list[int], list[int]]:
    ours, our_peaks, told = SAMPLER.draw_on_gpu(logits.to(DEVICE), rows)
    assert told.wait().tolist() == [*ours.tolist(), *our_peaks.tolist()]
    theirs, their_peaks = SAMPLER.draw_on_cpu(logits, rows)
    assert torch.equal(our_peaks.isfinite().cpu(), their_peaks.isfinite())
    return ours.tolist(), theirs.tolist()


@pytest.mark.parametrize("vocab_size", [5, 150])
@pytest.mark.parametrize("seed", range(effort(1, 2)))
def test_the_same_tokens(vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    history = np.array([1, 2, 4, 4], dtype=np.int32)
    rows = [
        SampleRow(SamplingParams(**asked), 100 * seed + i, i, history, history)
        for i, asked in enumerate(ASKED)
    ]
    logits = 3 * torch.randn(len(rows), vocab_size, generator=generator)
    ours, theirs = draw_both_ways(logits, rows)
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1  # exp rounds differently


@pytest.mark.parametrize("asked", ASKED, ids=repr)
def test_ties_stay_or_go_together(asked: dict) -> None:
    """Logits on a coarse grid, and some ruled out; noise over the whole interval."""
    history = np.array([1, 2, 4, 4], dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    line = torch.randint(-4, 5, (70,), generator=generator) / 2
    line[::9] = -torch.inf
    rows = [SampleRow(SamplingParams(**asked), i, 3, history, history) for i in range(effort(3, 6))]
    ours, theirs = draw_both_ways(line.expand(len(rows), -1).clone(), rows)
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1


def test_rows_that_are_no_distribution_are_known_and_harm_nobody() -> None:
    logits = torch.zeros(5, 70)
    logits[0, 40] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    rows = [SampleRow(SamplingParams(top_k=3, top_p=0.5), i, 0) for i in range(5)]
    ours, peaks, _ = SAMPLER.draw_on_gpu(logits.to(DEVICE), rows)
    assert peaks.isfinite().tolist() == [False, False, False, True, True]
    assert all(0 <= token < 70 for token in ours.tolist())
    assert ours.tolist()[3:] == SAMPLER.draw_on_cpu(logits[3:], rows[3:])[0].tolist()


def test_no_rows() -> None:
    token_ids, peaks, _ = SAMPLER.draw_on_gpu(torch.empty(0, 9, device=DEVICE), [])
    assert token_ids.shape == peaks.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [151936, 5003])
def test_a_vocabulary_of_real_size(monkeypatch, vocab_size: int) -> None:
    monkeypatch.setattr(sample, "STRETCH", 4096)
    monkeypatch.setattr(filter_thresholds, "WIDTH", 4096)
    asked = [
        *ASKED[:5],
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ]
    rows = [SampleRow(SamplingParams(**asked[i % len(asked)]), i, i) for i in range(64)]
    logits = 3 * torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0))
    ours, theirs = draw_both_ways(logits, rows)
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1
