"""When guessing pays, by chances and prices."""

from __future__ import annotations

import itertools

import pytest

from quire.speculative.controller import Controller, StepTimes


def after(right=0, wrong=0):
    controller = Controller()
    controller.note(right, wrong)
    return controller


def test_many_guesses_where_they_come_true():
    assert after(right=30).length(8, 0.1) == 8
    assert 1 <= after(right=5, wrong=4).length(8, 0.1) < 8


def test_few_or_none_where_they_are_dear():
    controller = after(right=30)
    assert controller.length(8, 0.9) >= controller.length(8, 1.5)
    controller = after(right=10, wrong=10)
    controller.length(8, 1.5)  # a trial
    assert controller.length(8, 1.5) == 0


def test_it_stops_while_it_loses_and_tries_again_ever_more_rarely():
    controller = after(wrong=30)
    trials = []
    for tokens in range(4000):
        if controller.length(8, 0.1):
            trials.append(tokens)
            controller.note(0, 1)
        controller.passed(1)
    gaps = [b - a for a, b in itertools.pairwise(trials)]
    assert gaps == sorted(gaps) and gaps[0] >= 32 and gaps[-1] >= 512 and len(trials) < 15


def test_it_comes_back_when_the_text_repeats():
    controller = after(wrong=30)
    controller.length(8, 0.1)
    assert controller.length(8, 0.1) == 0
    controller.note(20, 0)
    assert controller.length(8, 0.1) > 4


def test_none_beyond_the_end():
    assert after(right=30).length(0, 0.1) == 0


def test_prices_are_measured():
    times = StepTimes()
    assert 0 < times.price(4) < 1
    for _ in range(100):
        times.observe(sequences=4, guesses=0, seconds=0.010)
        times.observe(sequences=4, guesses=16, seconds=0.014)
    # 0.25 ms a guess, where a token takes 2.5 ms.
    assert times.price(4) == pytest.approx(0.1, rel=0.05)
    assert times.plain(4) == pytest.approx(0.010)
    assert times.plain(100) is None


def test_a_stall_is_no_price():
    times = StepTimes()
    for _ in range(50):
        times.observe(4, 0, 0.010)
        times.observe(4, 4, 0.011)
    before = times.price(4)
    times.observe(4, 4, 30.0)
    times.observe(4, 0, 30.0)
    assert times.price(4) < before + 0.5
    assert times.plain(4) < 0.012
