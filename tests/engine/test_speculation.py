"""Drafts in the engine: every pattern of right and wrong ones gives the tokens without any."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from drafts import ScriptedDrafter, speculate
from fake_model import expected, greedy, make_engine, next_token, run, step

from quire.params import SamplingParams


def true_tokens(name, token_ids, most):
    tokens = token_ids.tolist()
    for _ in range(most):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
def test_every_pattern_of_right_and_wrong_drafts(most, overlap):
    """All patterns at once, each row another, over block edges."""
    patterns = list(product([False, True], repeat=most))
    engine = make_engine(num_blocks=600, budget=400, max_seqs=len(patterns), overlap=overlap)
    prompts = [[1 + i % 40, 2, 3, *range(1, 1 + i % 7)] for i in range(len(patterns))]

    def is_spoilt(sequence, place):
        return patterns[int(sequence.request.id)][place % most]

    speculation = speculate(engine, ScriptedDrafter(true_tokens, is_spoilt), most)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(4 * most + 3))
    outputs = run(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].outputs[0].token_ids == expected(prompt, 4 * most + 3)
    assert 0 < speculation.total.accepted < speculation.total.drafted
    assert len(speculation.drafter.forgotten) == len(prompts)


@pytest.mark.parametrize("right", range(17))
def test_whole_blocks_come_back(right):
    """Sixteen drafts in blocks of eight, of which the first few are right."""
    engine = make_engine(num_blocks=40, block_size=8, budget=64)
    start = len([1, 2, 3]) + 1
    drafter = ScriptedDrafter(true_tokens, lambda _, place: (place - start) % 17 == right)
    speculate(engine, drafter, 16)
    engine.add_request("a", [1, 2, 3], greedy(60))
    held = []
    while engine.has_unfinished_requests():
        [*outputs] = step(engine)
        held += [len(s.table) * 8 - s.tokens.count for s in engine.scheduler.running]
    assert outputs[0].outputs[0].token_ids == expected([1, 2, 3], 60)
    assert max(held) < 8  # no block is kept for tokens that were not drawn


def test_no_key_covers_a_rejected_token():
    engine = make_engine(num_blocks=40, block_size=2, budget=64)
    drafter = ScriptedDrafter(true_tokens, lambda _, place: place % 3 == 0)
    speculate(engine, drafter, 5)
    engine.add_request("a", [1, 2, 3], greedy(31))
    tokens = [1, 2, 3, *expected([1, 2, 3], 31)]
    while engine.has_unfinished_requests():
        step(engine)
        found = engine.scheduler.cache.match("", np.array(tokens, dtype=np.int32), [], 34)
        assert len(found) == len(engine.scheduler.cache.index._by_block)


@pytest.mark.parametrize("overlap", [False, True])
def test_few_blocks_and_small_steps(overlap):
    """Preempted and chunked, and with neighbours that have no drafts."""
    engine = make_engine(num_blocks=14, block_size=4, budget=7, max_seqs=4, overlap=overlap)
    drafter = ScriptedDrafter(
        lambda s, ids, most: true_tokens(s, ids, most) if int(s.request.id) % 2 else [],
        lambda s, place: place % 4 == 0,
    )
    speculate(engine, drafter, 4)
    prompts = [[5, 6, 7, 8, 9, i] for i in range(6)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(20))
    outputs = run(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].outputs[0].token_ids == expected(prompt, 20)
    assert engine.scheduler.queues.num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_several_samples_draw_as_they_would_without(overlap):
    """Seeds and positions decide what is drawn, drafts or none."""
    params = SamplingParams(n=3, seed=5, max_tokens=17, ignore_eos=True)
    answers = []
    for most in (None, 3):
        engine = make_engine(num_blocks=80, overlap=overlap)
        if most is not None:
            guesses = ScriptedDrafter(lambda s, ids, k: [7] * k)  # mostly wrong
            speculate(engine, guesses, most)
        engine.add_request("a", [1, 2, 3], params)
        answers.append([o.token_ids for o in run(engine)["a"].outputs])
    assert answers[0] == answers[1]


def test_an_end_among_right_drafts():
    """What comes behind the end is not shown, though it was right."""
    tokens = expected([4, 5], 40, eos=())
    stop = tokens[9]
    first = tokens.index(stop)
    engine = make_engine(num_blocks=40)
    speculate(engine, ScriptedDrafter(true_tokens), 7)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    engine.add_request("a", [4, 5], params)
    output = run(engine)["a"].outputs[0]
    assert output.token_ids == tokens[: first + 1] and output.finish_reason == "stop"


def test_no_draft_beyond_the_last_token():
    engine = make_engine(num_blocks=40)
    speculate(engine, ScriptedDrafter(true_tokens), 5)
    engine.add_request("a", [4, 5], greedy(8))
    assert run(engine)["a"].outputs[0].token_ids == expected([4, 5], 8)
    assert max(s.starts[0] + s.counts[0] for s in engine.runner.plans) <= 2 + 8 - 1


def test_a_failed_step_takes_its_drafts_back():
    engine = make_engine(num_blocks=40, block_size=2)
    speculate(engine, ScriptedDrafter(true_tokens, lambda _, place: place % 5 == 0), 3)
    engine.add_request("a", [4, 5], greedy(20))
    failures = iter([4, 7, 9])
    due = next(failures)

    def fail(plan):
        nonlocal due
        if engine.runner.steps == due:
            due = next(failures, -1)
            raise RuntimeError("on purpose")

    engine.runner.before_launch = fail
    assert run(engine)["a"].outputs[0].token_ids == expected([4, 5], 20)
    assert due == -1


def test_an_abort_in_mid_draft_leaves_nothing_behind():
    engine = make_engine(num_blocks=40, overlap=True)
    speculation = speculate(engine, ScriptedDrafter(true_tokens), 4)
    engine.add_request("a", [4, 5], greedy(40))
    engine.add_request("b", [4, 6], greedy(40))
    for _ in range(3):
        step(engine)
    engine.abort_request("a")
    assert run(engine)["b"].outputs[0].token_ids == expected([4, 6], 40)
    assert not speculation._drafting
