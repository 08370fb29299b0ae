"""Masks on the CPU and by the kernel, against the bits themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.sampling import mask
from quire.params import SamplingParams
from quire.runner.sampling.masks import TokenMasks, mask_
from quire.runner.sampling.sampler import BadLogits, Sampler, SampleRow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLER = Sampler()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Several stretches even in a small vocabulary, none of which divides it."""
    monkeypatch.setattr(mask, "STRETCH", 64)


def packed(allowed: np.ndarray) -> np.ndarray:
    """Booleans `[rows, vocabulary]` as words; the bits behind the vocabulary are set."""
    gap = -allowed.shape[1] % 32
    padded = np.pad(allowed, ((0, 0), (0, gap)), constant_values=True)
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def random_masks(rng: np.random.Generator, rows: list[int], vocab_size: int):
    share = rng.random((len(rows), 1))
    allowed = rng.random((len(rows), vocab_size)) < share
    allowed[:, rng.integers(vocab_size)] = True
    return TokenMasks(np.array(rows, dtype=np.int32), packed(allowed)), allowed


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 150, 1000])
@pytest.mark.parametrize("rows", [[0], [0, 1, 2, 3], [1, 3]], ids=str)
def test_only_what_the_bits_allow_is_left(vocab_size: int, rows: list[int]) -> None:
    rng = np.random.default_rng(vocab_size)
    masks, allowed = random_masks(rng, rows, vocab_size)
    logits = torch.randn(4, vocab_size)
    wanted = logits.clone()
    wanted[rows] = torch.where(torch.from_numpy(allowed), logits[rows], -torch.inf)
    on_cpu = logits.clone()
    mask_(on_cpu, masks)
    assert torch.equal(on_cpu, wanted)
    by_kernel = logits.to(DEVICE)
    words = torch.from_numpy(masks.words).to(DEVICE)
    mask.rule_out_(by_kernel, torch.tensor(rows, dtype=torch.int32, device=DEVICE), words)
    assert torch.equal(by_kernel.cpu(), wanted)


ASKED = [
    {"temperature": 0},
    {},
    {"top_k": 3},
    {"top_p": 0.5, "temperature": 3.0},
    {"min_p": 0.2},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"logit_bias": {0: 100.0, 1: 100.0}},
]


@pytest.mark.parametrize("draw", ["draw_on_cpu", "draw_on_gpu"])
@pytest.mark.parametrize("seed", range(3))
def test_draws_obey_and_are_the_same_both_ways(draw: str, seed: int) -> None:
    """Beside rows without a mask, which draw what they would draw alone."""
    rng = np.random.default_rng(seed)
    history = np.array([1, 2, 4, 4], dtype=np.int32)
    asked = [SamplingParams(**each) for each in ASKED for _ in range(4)]
    rows = [SampleRow(params, i, i, history, history) for i, params in enumerate(asked)]
    masked = sorted(rng.choice(len(rows), size=15, replace=False).tolist())
    masks, allowed = random_masks(rng, masked, 150)
    logits = 3 * torch.randn(len(rows), 150, generator=torch.Generator().manual_seed(seed))
    untouched = logits.clone()
    where = DEVICE if draw == "draw_on_gpu" else "cpu"
    token_ids = getattr(SAMPLER, draw)(logits.to(where), rows, None, masks)[0].tolist()
    assert torch.equal(logits, untouched)
    for row, mask_of_row in zip(masked, allowed, strict=True):
        assert mask_of_row[token_ids[row]]
    free = [i for i in range(len(rows)) if i not in masked]
    alone = SAMPLER.draw_on_cpu(logits[free], [rows[i] for i in free])[0].tolist()
    differ = sum(token_ids[i] != other for i, other in zip(free, alone, strict=True))
    assert differ <= 1  # exp rounds differently
    if draw == "draw_on_gpu":
        others = SAMPLER.draw_on_cpu(logits, rows, None, masks)[0].tolist()
        assert sum(a != b for a, b in zip(token_ids, others, strict=True)) <= 1


def test_one_token_that_is_allowed_is_drawn_however_unlikely() -> None:
    allowed = np.zeros((2, 40), dtype=bool)
    allowed[0, 7] = allowed[1, 39] = True
    logits = torch.zeros(2, 40)
    logits[:, 3] = 1e30
    logits[1, 39] = -1e30
    rows = [SampleRow(SamplingParams(top_p=0.1), 1, 0), SampleRow(SamplingParams(), 2, 0)]
    masks = TokenMasks(np.array([0, 1], dtype=np.int32), packed(allowed))
    assert SAMPLER.sample(logits, rows, None, masks).to_host()[0] == [7, 39]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, 40)
    allowed = np.zeros((1, 40), dtype=bool)
    allowed[0, 5] = True
    row = SampleRow(SamplingParams(logprobs=3), 1, 0)
    masks = TokenMasks(np.zeros(1, dtype=np.int32), packed(allowed))
    _, logprobs = SAMPLER.sample(logits, [row], None, masks).to_host()
    assert logprobs[0] is not None
    assert logprobs[0].logprob == pytest.approx(float(logits.log_softmax(-1)[0, 5]), abs=1e-5)
    assert logprobs[0].top_ids == tuple(logits[0].topk(3).indices.tolist())


def test_a_mask_that_allows_nothing_is_an_error_of_its_row() -> None:
    words = np.array([[0, 0], [-1, -1]], dtype=np.int32)
    masks = TokenMasks(np.array([0, 1], dtype=np.int32), words)
    rows = [SampleRow(SamplingParams(temperature=0), 1, 0) for _ in range(3)]
    with pytest.raises(BadLogits) as caught:
        SAMPLER.sample(torch.zeros(3, 64), rows, None, masks).to_host()
    assert caught.value.rows == [0]
