"""A prompt that shares part of a cached block gets a copy of it and computes only the rest."""

from __future__ import annotations

import pytest
import torch
from fake_model import expected, greedy, make_engine, run, step
from patience import PATIENCE_S

BLOCK = 4
FIRST = list(range(1, 13))


def ask(engine, prompt, max_tokens=6, name="a", **options):
    """One request alone; its answer is right, whatever it found."""
    engine.add_request(name, prompt, greedy(max_tokens), **options)
    output = run(engine)[name]
    assert output.outputs[0].token_ids == expected(prompt, max_tokens)
    return output


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("whole", [0, 1, 2])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_a_part_of_any_length(block_size, whole, budget):
    engine = make_engine(num_blocks=128, block_size=block_size, budget=budget)
    first = [i % 40 + 1 for i in range(3 * block_size)]
    ask(engine, first)
    for part in range(1, block_size):
        shared = whole * block_size + part
        prompt = [*first[:shared], 41 + part % 9, *[49] * (part % 5)]
        before = engine.runner.computed
        output = ask(engine, prompt)
        assert output.num_cached_tokens == shared
        assert output.cached_tokens_by_tier == {"device": shared}
        assert engine.runner.computed - before == len(prompt) - shared + 5
    assert engine.runner.parts_copied == block_size - 1


def test_a_prompt_that_is_cached_to_its_end_computes_one_token():
    engine = make_engine()
    ask(engine, FIRST)
    before = engine.runner.computed
    assert ask(engine, FIRST, max_tokens=1).num_cached_tokens == 11
    assert engine.runner.computed - before == 1


def test_the_block_with_the_most_in_common_is_taken():
    engine = make_engine(num_blocks=64)
    for other in ([1, 2, 9, 9], [1, 2, 3, 9], [1, 8, 8, 8]):
        ask(engine, [*FIRST[4:8], *other, 5])
    assert ask(engine, [*FIRST[4:8], 1, 2, 3, 4, 5]).num_cached_tokens == 7


def test_what_a_step_fills_is_not_copied_before_it():
    engine = make_engine(num_blocks=32)
    together = {name: [*FIRST[:6], 20 + i, 30, 31] for i, name in enumerate("abc")}
    for name, prompt in together.items():
        engine.add_request(name, prompt, greedy(3))
    outputs = run(engine)
    assert {n: outputs[n].outputs[0].token_ids for n in outputs} == {
        n: expected(p, 3) for n, p in together.items()
    }
    assert [outputs[n].num_cached_tokens for n in together] == [0, 4, 4]
    assert ask(engine, [*FIRST[:6], 40]).num_cached_tokens == 6


def test_a_part_is_not_taken_where_its_block_is_needed():
    engine = make_engine(num_blocks=3, block_size=4)
    ask(engine, FIRST[:8], max_tokens=1)
    assert ask(engine, [*FIRST[:6], 20, 21, 22, 23], max_tokens=2).num_cached_tokens == 4


def test_other_salts_share_no_part():
    engine = make_engine()
    ask(engine, FIRST)
    assert ask(engine, [*FIRST[:6], 20], cache_salt="x").num_cached_tokens == 0


def test_a_burst_behind_one_block_shares_its_part_in_one_step():
    """Each fills a block of its own, newer than the one that all of them copy."""
    engine = make_engine(num_blocks=600, budget=2000, max_seqs=200, host_slots=600)
    ask(engine, FIRST)
    prompts = {str(i): [*FIRST[:6], i % 20 + 20, i // 20 + 20, 5] for i in range(150)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(2))
    before = engine.runner.steps
    outputs = run(engine)
    assert {output.num_cached_tokens for output in outputs.values()} == {6}
    assert engine.runner.steps - before == 2
    assert engine.runner.parts_copied == 150
    for name, prompt in prompts.items():
        assert outputs[name].outputs[0].token_ids == expected(prompt, 2)


def test_a_whole_block_of_a_lower_tier_is_better():
    engine = make_engine(num_blocks=32, host_slots=32)
    ask(engine, FIRST, max_tokens=1)
    assert engine.scheduler.tiering.store.flush(PATIENCE_S)
    engine.scheduler.cache.clear()
    ask(engine, [*FIRST[:6], 20, 21, 22], max_tokens=1)
    output = ask(engine, [*FIRST[:11], 20])
    assert output.cached_tokens_by_tier == {"device": 4, "host": 4}
    assert ask(engine, [*FIRST[:7], 30, 31]).cached_tokens_by_tier == {"device": 7}


@pytest.mark.parametrize("where", ["before_copy", "before_launch", "before_result"])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("host_slots", [None, 32])
def test_a_step_that_copies_and_fails(where, error, host_slots):
    """Copies that no sequence waits for any more may not keep others from being loaded."""
    engine = make_engine(num_blocks=32, host_slots=host_slots)
    ask(engine, FIRST)
    failures = iter([True])

    def fail(*_):
        if next(failures, False):
            raise error("once")

    setattr(engine.runner, where, fail)
    assert ask(engine, [*FIRST[:6], 20, 21, 22]).num_cached_tokens == 6


def test_an_abort_while_the_copy_is_under_way():
    engine = make_engine(num_blocks=5)
    ask(engine, FIRST)
    engine.add_request("gone", [*FIRST[:6], 20], greedy(6))
    step(engine)
    engine.abort_request("gone")
    ask(engine, [30] * 18, max_tokens=2)
    assert ask(engine, [*FIRST[:6], 20], name="b").num_cached_tokens == 0
