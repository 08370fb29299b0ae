"""A request says why its prompt was not found in the cache."""

from __future__ import annotations

from fake_model import greedy, make_engine, run

from quire.engine.observe.introspection import engine_stats

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]


def reason(engine, prompt, **options):
    engine.add_request("r", prompt, greedy(1), **options)
    return run(engine)["r"].miss_reason


def test_every_reason():
    engine = make_engine(num_blocks=64)
    assert reason(engine, PROMPT) == "nothing is cached past token 0"
    assert reason(engine, PROMPT) is None
    other = [*PROMPT[:6], 1, 1, 1, 1, 1, 1]
    assert reason(engine, other) == "token 6 differs from what is cached"
    assert reason(engine, PROMPT + [3] * 9) == "nothing is cached past token 12"
    assert engine_stats(engine)["prefix"]["misses"] == {"nothing cached": 2, "differs": 1}


def test_what_another_tenant_has_asked_is_no_reason():
    engine = make_engine(num_blocks=64)
    reason(engine, PROMPT, cache_salt="one")
    salted = reason(engine, PROMPT, cache_salt="two")
    assert salted == reason(engine, [9] * len(PROMPT), cache_salt="three")
    assert salted == "nothing is cached past token 0"
    assert engine_stats(engine)["prefix"]["misses"] == {"nothing cached": 3}


def test_what_had_to_make_room():
    engine = make_engine(num_blocks=8)
    reason(engine, PROMPT)
    for first in range(20, 50, 5):
        reason(engine, [first] * 13)
    assert reason(engine, PROMPT) == "what was cached past token 0 had to make room"
    assert reason(engine, [*PROMPT[:6], 1, 1, 1, 1]) == "token 6 differs from what is cached"
    assert engine_stats(engine)["prefix"]["misses"]["evicted"] == 1


def test_with_caching_off():
    engine = make_engine(caching=False)
    assert reason(engine, PROMPT) == "prefix caching is off"
