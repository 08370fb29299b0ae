"""When guessing pays, by chances and prices."""

from __future__ import annotations

import itertools

import pytest

from quire.speculative.controller import Controller, Price, StepTimes


def after(right=0, wrong=0):
    controller = Controller()
    controller.note(right, wrong)
    return controller


def test_many_guesses_where_they_come_true():
    assert after(right=30).length(8, Price(0.0, 0.1)) == 8
    assert 1 <= after(right=5, wrong=4).length(8, Price(0.0, 0.1)) < 8


def test_few_or_none_where_they_are_dear():
    controller = after(right=30)
    assert controller.length(8, Price(0.0, 0.9)) >= controller.length(8, Price(0.0, 1.5))
    controller = after(right=10, wrong=10)
    controller.length(8, Price(0.0, 1.5))  # a trial
    assert controller.length(8, Price(0.0, 1.5)) == 0


def test_it_stops_while_it_loses_and_tries_again_ever_more_rarely():
    controller = after(wrong=30)
    trials = []
    for tokens in range(4000):
        if controller.length(8, Price(0.0, 0.1)):
            trials.append(tokens)
            controller.note(0, 1)
        controller.passed(1)
    gaps = [b - a for a, b in itertools.pairwise(trials)]
    assert gaps == sorted(gaps) and gaps[0] >= 32 and gaps[-1] >= 512 and len(trials) < 15


def test_it_comes_back_when_the_text_repeats():
    controller = after(wrong=30)
    controller.length(8, Price(0.0, 0.1))
    assert controller.length(8, Price(0.0, 0.1)) == 0
    controller.note(20, 0)
    assert controller.length(8, Price(0.0, 0.1)) > 4


def test_none_beyond_the_end():
    assert after(right=30).length(0, Price(0.0, 0.1)) == 0


def test_what_it_costs_to_guess_at_all_makes_for_longer_guesses():
    controller = after(right=7, wrong=3)
    dear_start, dear_guesses = Price(0.3, 0.01), Price(0.0, 0.2)
    assert controller.length(4, dear_start) == 4 > controller.length(4, dear_guesses) > 0
    assert after(right=2, wrong=20).length(4, dear_start) == 2  # a trial
    assert controller.length(4, Price(3.0, 0.0)) < 4


def measured(start, each, guesses):
    """Steps of four sequences take 10 ms, and so much more with guesses."""
    times = StepTimes()
    for i in range(200):
        times.observe(4, 0, 0.010)
        count = guesses[i % len(guesses)]
        times.observe(4, count, 0.010 + start + each * count)
    return times


def test_prices_are_measured():
    times = StepTimes()
    assert 0 < times.price(4, 4).each < 1
    times = measured(start=0.0, each=0.00025, guesses=[4, 8, 12, 16])
    # 0.25 ms a guess, where a token takes 2.5 ms.
    assert times.price(4, 4).each == pytest.approx(0.1, rel=0.05)
    assert times.price(4, 4).any == pytest.approx(0, abs=0.02)
    assert times.plain(4) == pytest.approx(0.010)
    assert times.plain(100) is None


def test_what_is_paid_once_is_told_from_what_each_costs():
    times = measured(start=0.002, each=0.0001, guesses=[4, 8, 12, 16])
    together, alone = times.price(4, 4), times.price(4, 1)
    assert together.each == alone.each == pytest.approx(0.04, rel=0.1)
    assert alone.any == pytest.approx(4 * together.any) == pytest.approx(0.8, rel=0.1)


def test_where_the_number_never_changes_more_are_tried():
    times = measured(start=0.002, each=0.0001, guesses=[8])
    assert times.price(4, 4).each < 0.04 < times.price(4, 4).any


def test_a_stall_is_no_price():
    times = measured(start=0.0, each=0.00025, guesses=[4])
    before = sum(times.price(4, 4))
    times.observe(4, 4, 30.0)
    times.observe(4, 0, 30.0)
    assert sum(times.price(4, 4)) < before + 1
    assert times.plain(4) < 0.012
