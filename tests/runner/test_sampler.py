"""The sampler against a slow, obvious one that takes each row by itself in plain Python."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from effort import effort
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plain_sampler import INF, on_edge, reference_logits, reference_probabilities

from quire.params import SamplingParams
from quire.runner.sampling import filters
from quire.runner.sampling.penalties import adjust_
from quire.runner.sampling.sampler import BadLogits, Sampler, SampleRow, filtered_weights_, invert

FOUR_SIGMA = 4.0
sample = Sampler().sample
thorough = settings(
    deadline=None,
    max_examples=effort(40, 80),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --- the sampler ------------------------------------------------------------------------------


def distribution(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """What the sampler draws from, for rows that are not greedy."""
    logits = logits.clone()
    adjust_(logits, rows)
    peaks = logits.max(-1, keepdim=True).values
    weights = filtered_weights_(logits, peaks, [row.params for row in rows])
    return weights / weights.sum(-1, keepdim=True)


# --- strategies -------------------------------------------------------------------------------


@st.composite
def any_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    return SamplingParams(
        temperature=one(0.0, 0.3, 0.9, 1.0, 1.7, 20.0),
        top_k=one(-1, 0, 1, 2, 3, vocab_size, vocab_size + 5),
        top_p=one(1.0, 1e-9, 0.137, 0.5331, 0.871, 0.9937),
        min_p=one(0.0, 0.0, 0.0513, 0.313, 1.0),
        # Odd numbers, so that no two logits become equal that were not: float32 would know better.
        repetition_penalty=one(1.0, 1.0, 1.31371, 0.71193),
        presence_penalty=one(0.0, 0.0, 0.41373, -1.12357),
        frequency_penalty=one(0.0, 0.0, 0.35513, -0.21179),
        logit_bias=draw(
            st.none()
            | st.dictionaries(st.integers(0, vocab_size - 1), st.sampled_from([-100.0, -1.5, 3.0]))
        ),
    )


@st.composite
def any_row(draw: st.DrawFn, vocab_size: int) -> SampleRow:
    params = draw(any_params(vocab_size))
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    return SampleRow(
        params=params,
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        position=draw(st.integers(0, 5000)),
        prompt_ids=np.array(draw(ids), dtype=np.int32) if params.needs_penalties else None,
        output_ids=np.array(draw(ids), dtype=np.int32) if params.needs_penalties else None,
        banned=tuple(draw(st.sets(st.integers(0, vocab_size - 1), max_size=vocab_size - 1))),
    )


@st.composite
def any_batch(draw: st.DrawFn) -> tuple[torch.Tensor, list[SampleRow]]:
    """Logits on a coarse grid: plenty of exact ties, and some tokens ruled out by the model."""
    vocab_size = draw(st.integers(1, 9))
    rows = draw(st.lists(any_row(vocab_size), min_size=1, max_size=5))
    grid = st.integers(-12, 12).map(lambda i: i / 2) | st.just(-INF)
    logits = draw(
        st.lists(
            st.lists(grid, min_size=vocab_size, max_size=vocab_size),
            min_size=len(rows),
            max_size=len(rows),
        )
    )
    for row, of_row in zip(rows, logits, strict=True):
        assume(max(reference_logits(of_row, row)) > -INF)
    return torch.tensor(logits), rows


WIDTHS = [(1024, 256), (3, 2), (0, 1)]  # of filters: as they are, and so small that all paths run


# --- the distribution -------------------------------------------------------------------------


@pytest.mark.parametrize(("short", "nucleus"), WIDTHS)
@thorough
@given(batch=any_batch())
def test_support_and_probabilities_equal_the_reference(
    short: int, nucleus: int, batch: tuple[torch.Tensor, list[SampleRow]]
) -> None:
    logits, rows = batch
    kept = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    assume(kept)
    rows = [rows[i] for i in kept]
    logits = logits[kept]
    changed = [reference_logits(logits[i].tolist(), row) for i, row in enumerate(rows)]
    assume(not any(on_edge(c, row.params) for c, row in zip(changed, rows, strict=True)))
    with mock.patch.multiple(filters, SHORT=short, NUCLEUS=nucleus):
        found = distribution(logits, rows)
    for got, of_row, row in zip(found, changed, rows, strict=True):
        expected = reference_probabilities(of_row, row.params)
        visible = [p > 1e-30 for p in expected]  # float32 has no smaller ones
        assert (got > 1e-30).tolist() == visible
        assert got.tolist() == pytest.approx(expected, rel=2e-4, abs=1e-7)


@thorough
@given(batch=any_batch())
def test_a_row_draws_the_same_alone_and_among_neighbours(
    batch: tuple[torch.Tensor, list[SampleRow]],
) -> None:
    logits, rows = batch
    before = logits.clone()
    together, _ = sample(logits, rows).to_host()
    assert torch.equal(logits, before)  # the caller's logits are left alone
    for i, row in enumerate(rows):
        alone, _ = sample(logits[i : i + 1], [row]).to_host()
        assert alone == [together[i]]
        changed = reference_logits(logits[i].tolist(), row)
        if not on_edge(changed, row.params):
            assert reference_probabilities(changed, row.params)[together[i]] > 0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.02, "temperature": 1.4},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {0: 2.0, 7: -100.0}},
    ],
    ids=repr,
)
def test_draws_follow_the_distribution(asked: dict[str, Any]) -> None:
    vocab_size, draws = 12, 8000
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(1, vocab_size, generator=generator)
    params = SamplingParams(**asked)
    history = np.array([1, 1, 4, 4, 4, 9], dtype=np.int32)
    rows = [
        SampleRow(params, seed=seed, position=seed % 7, prompt_ids=history, output_ids=history)
        for seed in range(draws)
    ]
    token_ids, _ = sample(logits.expand(draws, -1), rows).to_host()
    changed = reference_logits(logits[0].tolist(), rows[0])
    expected = draws * np.array(reference_probabilities(changed, params))
    counts = np.bincount(token_ids, minlength=vocab_size)
    assert not counts[expected == 0].any()
    likely = expected > 5  # chi-squared wants a few of each
    counts = np.append(counts[likely], counts[~likely].sum() + 1)
    expected = np.append(expected[likely], expected[~likely].sum() + 1)
    freedom = len(counts) - 1
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)  # Wilson and Hilferty: its cube root is close to normal
    assert ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < FOUR_SIGMA


def test_one_sequence_draws_afresh_at_every_position() -> None:
    rows = [SampleRow(SamplingParams(), seed=5, position=i) for i in range(4000)]
    token_ids, _ = sample(torch.zeros(4000, 10), rows).to_host()
    counts = np.bincount(token_ids, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 35


# --- a vocabulary of real size ----------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [49152, 5003])
@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_large_vocabulary(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    asked: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 2000, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"top_p": 0.5, "min_p": 0.05},
        {"min_p": 0.2},
        {},
    ]
    rows = [SampleRow(SamplingParams(**each), seed=i, position=0) for i, each in enumerate(asked)]
    logits = spread * torch.randn(len(rows), vocab_size, generator=generator)
    found = distribution(logits, rows)
    for got, of_row, row in zip(found, logits.tolist(), rows, strict=True):
        expected = np.array(reference_probabilities(of_row, row.params))
        assert (
            abs(int((got > 0).sum()) - int((expected > 1e-38).sum())) <= 2
        )  # rounding at the edge
        assert np.abs(got.numpy() - expected).sum() < 1e-3
    token_ids, _ = sample(logits, rows).to_host()
    for i, row in enumerate(rows):
        assert found[i, token_ids[i]] > 0
        assert sample(logits[i : i + 1], [row]).to_host()[0] == [token_ids[i]]


# --- the draw itself --------------------------------------------------------------------------

WEIGHTS = st.sampled_from([0.0, 0.0, 1e-38, 1e-20, 1e-4, 0.3, 1.0])
NOISE = st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-53]) | st.floats(1e-6, 0.99999)


@thorough
@given(
    weights=st.integers(1, 400).flatmap(lambda n: st.lists(WEIGHTS, min_size=n, max_size=n)),
    noise=NOISE,
)
def test_inversion_finds_the_token_and_never_one_without_weight(
    weights: list[float], noise: float
) -> None:
    assume(any(weights))
    token = int(invert(torch.tensor([weights]), torch.tensor([noise], dtype=torch.float64))[0])
    assert weights[token] > 0
    exact = [float(np.float32(weight)) for weight in weights]
    target, below = noise * math.fsum(exact), math.fsum(exact[:token])
    slack = 1e-5 * math.fsum(exact)
    assert below - slack <= target <= below + exact[token] + slack


def test_inversion_of_every_single_token() -> None:
    for vocab_size in (1, 127, 128, 129, 300):
        tokens = torch.arange(vocab_size)
        for value in (2.0**-53, 0.5, 1 - 2.0**-53):
            noise = torch.full((vocab_size,), value, dtype=torch.float64)
            assert torch.equal(invert(torch.eye(vocab_size), noise), tokens)


# --- corners ----------------------------------------------------------------------------------


def draw_one(logits: list[float], **asked: Any) -> int:
    (token,), _ = sample(
        torch.tensor([logits]), [SampleRow(SamplingParams(**asked), seed=1, position=0)]
    ).to_host()
    return token


def test_greedy_takes_the_first_of_equals() -> None:
    assert draw_one([0.0, 3.0, 3.0, 1.0], temperature=0) == 1
    assert draw_one([0.0, 3.0, 3.0, 1.0], temperature=0, logit_bias={0: 3.0}) == 0
    assert draw_one([0.0, 3.0, 3.0, 1.0], temperature=1e-6) == 1


def test_ties_at_the_edge_all_stay() -> None:
    rows = [SampleRow(SamplingParams(top_k=2), seed=seed, position=0) for seed in range(300)]
    token_ids, _ = sample(torch.tensor([[1.0, 1.0, 1.0, 0.0]]).expand(300, -1), rows).to_host()
    assert set(token_ids) == {0, 1, 2}


@pytest.mark.parametrize(
    ("logits", "asked", "expected"),
    [
        ([1e30, -1e30, 0.0], {}, 0),
        ([3e38, -3e38, 1.0], {"temperature": 0.0001}, 0),
        ([-1e30, -2e30], {"temperature": 100}, 0),
        ([-INF, -INF, -2.0, -INF], {"top_k": 2, "top_p": 0.5}, 2),
        ([-INF, 5.0, -INF], {"min_p": 1.0}, 1),
        ([7.0], {"top_k": 40, "top_p": 0.3}, 0),
        ([7.0], {"temperature": 0}, 0),
        ([0.0, 4.0, 0.0], {"top_p": 1e-300}, 1),
        ([0.0, 4.0, 0.0], {"top_k": 1}, 1),
        ([0.0, 4.0, 3.9], {"min_p": 1.0}, 1),
        ([0.0, 4.0, 3.9], {"logit_bias": {0: 100.0}}, 0),
        ([0.0, 4.0, 3.9], {"temperature": 0, "logit_bias": {1: -0.2}}, 2),
    ],
)
def test_extreme_rows(logits: list[float], asked: dict[str, Any], expected: int) -> None:
    assert draw_one(logits, **asked) == expected


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    for seed in range(20):
        rows = [
            SampleRow(SamplingParams(top_k=k), seed=seed, position=0) for k in (0, -1, 3, 2**31 - 1)
        ]
        token_ids, _ = sample(torch.zeros(4, 3), rows).to_host()
        assert len(set(token_ids)) == 1


def test_banned_tokens_are_never_drawn() -> None:
    for temperature in (0, 1, 100):
        rows = [
            SampleRow(SamplingParams(temperature=temperature), seed=s, position=0, banned=(0, 2))
            for s in range(50)
        ]
        token_ids, _ = sample(torch.tensor([[9.0, 1.0, 9.0, 1.0]]).expand(50, -1), rows).to_host()
        assert set(token_ids) <= {1, 3}


def test_repeated_ids_count_once_for_presence_and_each_time_for_frequency() -> None:
    logits = torch.tensor([[4.0, -4.0, 0.0, 2.0]])
    row = SampleRow(
        SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25),
        seed=0,
        position=0,
        prompt_ids=np.array([0, 0, 1, 1], dtype=np.int32),
        output_ids=np.array([3, 3, 3], dtype=np.int32),
    )
    adjust_(logits, [row])
    assert logits.tolist() == [[2.0, -8.0, 0.0, 2.0 / 2 - 0.5 - 3 * 0.25]]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, INF, "all"])
def test_unusable_logits_name_their_rows(temperature: float, bad: float | str) -> None:
    logits = torch.zeros(4, 200)
    for row in (1, 3):
        if bad == "all":
            logits[row] = -INF
        else:
            logits[row, 150] = bad
    rows = [
        SampleRow(SamplingParams(temperature=temperature, top_p=0.9, logprobs=1), 0, 0)
        for _ in range(4)
    ]
    drawn = sample(logits, rows)
    assert int(drawn.token_ids.max()) < 200  # valid ids, also where the row is lost
    with pytest.raises(BadLogits) as caught:
        drawn.to_host()
    assert caught.value.rows == [1, 3]


def test_a_row_with_every_token_banned_is_unusable() -> None:
    row = SampleRow(SamplingParams(), 0, 0, banned=(0, 1, 2))
    with pytest.raises(BadLogits):
        sample(torch.zeros(1, 3), [row]).to_host()


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 8), []).to_host() == ([], [])


def test_inside_inference_mode() -> None:
    with torch.inference_mode():
        logits = torch.zeros(2, 8)
        rows = [SampleRow(SamplingParams(temperature=t), 0, 0) for t in (0, 1)]
        assert len(sample(logits, rows).to_host()[0]) == 2


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    choices = np.random.default_rng(0)
    rows = []
    for i in range(300):
        history = choices.integers(0, 5003, 20).astype(np.int32)
        params = SamplingParams(
            temperature=choices.choice([0.0, 0.7, 1.3]),
            top_k=int(choices.choice([0, 20, 3000])),
            top_p=choices.choice([1.0, 0.9]),
            min_p=choices.choice([0.0, 0.01]),
            repetition_penalty=choices.choice([1.0, 1.2]),
            frequency_penalty=choices.choice([0.0, 0.3]),
            logprobs=choices.choice([None, 0, 5]),
        )
        rows.append(SampleRow(params, i, 3, history, history, banned=(1, 2)))
    logits = 3 * torch.randn(300, 5003, generator=generator)
    on_cpu, cpu_logprobs = sample(logits, rows).to_host()
    on_gpu, gpu_logprobs = sample(logits.cuda(), rows).to_host()
    assert sum(a != b for a, b in zip(on_cpu, on_gpu, strict=True)) <= 1  # exp rounds differently
    for ours, theirs in zip(cpu_logprobs, gpu_logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours and theirs and ours.token_id == theirs.token_id:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_token_that_only_the_device_knows_is_penalised_like_any_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=1.1, frequency_penalty=-0.6),
        SamplingParams(),
        SamplingParams(frequency_penalty=0.9, repetition_penalty=0.8),
    ]
    history = np.array([3, 9, 9, 21], dtype=np.int32)
    newest = [9, 9, 4, 30]
    drawn = torch.tensor(newest[::-1])

    def rows(known: bool) -> list[SampleRow]:
        made = []
        for i, each in enumerate(params):
            output = np.append(history, np.int32(newest[i])) if known else history
            row = SampleRow(each, seed=i, position=0, prompt_ids=history, output_ids=output)
            row.fed_from = -1 if known else 3 - i
            made.append(row)
        return made

    wanted, got = logits.clone(), logits.clone()
    adjust_(wanted, rows(known=True))
    adjust_(got, rows(known=False), drawn)
    torch.testing.assert_close(got, wanted)
    first = SampleRow(params[1], seed=0, position=1, output_ids=history[:0], fed_from=0)
    got = logits[:1].clone()
    adjust_(got, [first], drawn)
    assert (got != logits[:1]).nonzero().tolist() == [[0, 30]]
