"""Noise: frozen over platforms and versions, evenly spread, never 0 or 1."""

from __future__ import annotations

import numpy as np

from quire.runner.sampling.noise import sample_seed, uniform, unit_interval

VECTOR = [
    "0.652448486374032",
    "0.701212109521525",
    "0.368189515651670",
    "0.734720458462364",
    "0.366242090169758",
    "0.139442838720147",
    "0.366242090169758",
    "0.199163994022271",
]
SEEDS = [11005842265471244948, 9123563634233420727, 14965637864247705270, 5594803596176803025]


def chi_squared_is_unsurprising(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Wilson and Hilferty: the cube root of chi-squared is close to normal; four sigma allowed."""
    freedom = counts.size - 1
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return abs((chi_squared / freedom) ** (1 / 3) - (1 - spread)) < 4 * spread**0.5


def test_frozen_vector() -> None:
    """A seed keeps its meaning for ever: change the generator, and users' outputs change."""
    seeds = [0, 0, 1, 42, -1, 2**63, 2**64 - 1, 123456789]
    positions = [0, 1, 0, 7, 0, 5, 0, 2**40]
    assert [f"{value:.15f}" for value in uniform(seeds, positions)] == VECTOR
    assert [sample_seed(0, 0), sample_seed(0, 1), sample_seed(42, 3), sample_seed(-1, 0)] == SEEDS


def test_a_negative_seed_is_its_unsigned_twin() -> None:
    assert uniform([-1], [3]) == uniform([2**64 - 1], [3])
    assert sample_seed(-5, 1) == sample_seed(2**64 - 5, 1)


def test_the_ends_are_never_reached() -> None:
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    low, high = unit_interval(extremes)
    assert 0 < low < 1e-15 and 1 - 1e-15 < high < 1


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    count = 40_000
    fixed, running = [7] * count, list(range(count))
    for one, other in [
        (uniform(fixed, running), uniform(fixed, [i + 1 for i in running])),
        (uniform(running, fixed), uniform([i + 1 for i in running], fixed)),
        (uniform(running, fixed), uniform(running, [8] * count)),
        (uniform([i << 32 for i in running], fixed), uniform([-i for i in running], fixed)),
    ]:
        cells = (one * 20).astype(int) * 20 + (other * 20).astype(int)
        counts = np.bincount(cells, minlength=400)
        assert chi_squared_is_unsurprising(counts, np.full(400, count / 400))


def test_samples_of_one_request_and_of_the_next_have_their_own_seeds() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(200) for sample in range(50)}
    assert len(seeds) == 200 * 50
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_row_does_not_depend_on_its_batch() -> None:
    many = uniform(list(range(100)), list(range(100)))
    assert [uniform([i], [i])[0] for i in range(100)] == many.tolist()
