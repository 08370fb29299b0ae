"""Logprobs are those of the model's own distribution, whatever the draw was made from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import QuireError
from quire.params import SamplingParams
from quire.runner.sampling.logprobs import PromptScores, score
from quire.runner.sampling.sampler import Logprobs, Sampler, SampleRow

VOCAB = 50
sample = Sampler().sample


def logits_of(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def check(entry: Logprobs, logits: torch.Tensor, token_id: int, k: int) -> None:
    expected = logits.double().log_softmax(-1)
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[token_id]).sum())
    best = expected.sort(descending=True)
    assert list(entry.top_ids) == best.indices[:k].tolist()
    assert list(entry.top_logprobs) == pytest.approx(best.values[:k].tolist(), abs=1e-5)


def test_logprobs_are_raw_and_cut_to_what_each_row_asked_for() -> None:
    history = np.array([1, 2, 3], dtype=np.int32)
    asked: list[tuple[SamplingParams, bool]] = [
        (SamplingParams(temperature=0, logprobs=3), False),
        (SamplingParams(temperature=0), False),
        (SamplingParams(logprobs=0, top_k=2), False),
        (SamplingParams(logprobs=20, repetition_penalty=2.0, logit_bias={4: 50.0}), False),
        (SamplingParams(), True),
        (SamplingParams(temperature=3.0, logprobs=1), True),
    ]
    rows = [
        SampleRow(params, seed, 0, history, history, want_logprob=want)
        for seed, (params, want) in enumerate(asked)
    ]
    logits = logits_of(len(rows))
    token_ids, entries = sample(logits, rows).to_host()
    assert token_ids[3] == 4  # the bias made it so, and it must not show in its logprob
    assert entries[1] is None
    for i, (params, _) in enumerate(asked):
        if (entry := entries[i]) is not None:
            check(entry, logits[i], token_ids[i], params.logprobs or 0)
    assert sum(entry is not None for entry in entries) == 5


def test_all_rows_want_them() -> None:
    rows = [SampleRow(SamplingParams(logprobs=2), seed, 0) for seed in range(8)]
    logits = logits_of(8)
    token_ids, entries = sample(logits, rows).to_host()
    for i, entry in enumerate(entries):
        assert entry is not None
        check(entry, logits[i], token_ids[i], 2)


def test_more_than_the_vocabulary_has() -> None:
    (_,), (entry,) = sample(
        torch.zeros(1, 3), [SampleRow(SamplingParams(logprobs=9), 0, 0)]
    ).to_host()
    assert entry is not None and sorted(entry.top_ids) == [0, 1, 2] and entry.rank == 1


def test_entries_name_every_token_once() -> None:
    entry = Logprobs(7, -2.0, 2, (3, 7, 9), (-1.0, -2.0, -3.0))
    assert list(entry.entries()) == [(7, -2.0, 2), (3, -1.0, 1), (9, -3.0, 3)]
    assert list(Logprobs(7, -9.0, 40, (3,), (-1.0,)).entries()) == [(7, -9.0, 40), (3, -1.0, 1)]


@pytest.mark.parametrize("k", [0, 5])
def test_prompt_logprobs(k: int) -> None:
    logits = logits_of(6)
    next_ids = torch.tensor([0, 5, 5, 49, 1, 2])
    entries = PromptScores(next_ids.tolist(), k, score(logits, next_ids, k)).to_host()
    assert len(entries) == 6
    for entry, row, token_id in zip(entries, logits, next_ids.tolist(), strict=True):
        check(entry, row, token_id, k)


def test_prompt_logprobs_of_unusable_logits() -> None:
    logits = logits_of(3)
    logits[1, 7] = torch.nan
    with pytest.raises(QuireError, match="no usable logits"):
        PromptScores([0, 0, 0], 2, score(logits, torch.tensor([0, 0, 0]), 2)).to_host()
