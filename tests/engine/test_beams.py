"""Beams among other requests: in small pools, in few places, preempted, dropped, aborted."""

from __future__ import annotations

import random

import pytest
from fake_model import (
    VOCAB,
    check_idle,
    expected,
    greedy,
    logprobs_behind,
    make_engine,
    next_token,
    run,
    step,
)
from plain_beams import plain_beams

from quire import BeamSearchParams, RequestError
from quire.engine.observe.introspection import engine_stats


def params(width=4, max_tokens=10, **more):
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **more)


def right(output, prompt, asked, room):
    found = [(beam.token_ids, pytest.approx(beam.score)) for beam in output.outputs]
    assert found == plain_beams(prompt, asked, logprobs_behind, room)


@pytest.mark.diagonal
@pytest.mark.parametrize("policy", ["fcfs", "priority", "cache-aware"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_seqs", [1, 3, 16])
@pytest.mark.parametrize("blocks", [6, 60])
def test_the_same_beams_in_any_pool(policy, caching, max_seqs, blocks):
    """Beams that wait for each other never keep each other from going on."""
    engine = make_engine(blocks, 4, 7, max_seqs, policy, caching)
    prompts = {str(i): [1 + i % 2] * (3 + 2 * i) for i in range(5)}
    asked = {name: params(1 + int(name), ignore_eos=True) for name in prompts}
    for name, prompt in prompts.items():
        priority = -int(name) if policy == "priority" else 0
        engine.add_request(name, prompt, asked[name], priority=priority)
    engine.add_request("greedy", [1, 1, 1, 2], greedy(9))
    outputs = run(engine)
    assert outputs.pop("greedy").outputs[0].token_ids == expected([1, 1, 1, 2], 9)
    for name, output in outputs.items():
        right(output, prompts[name], asked[name], 4 * blocks)
    assert engine.scheduler.queues.num_preemptions > 0 or blocks == 60


@pytest.mark.parametrize("max_seqs", [2, 16])
def test_loaded_from_a_lower_tier(max_seqs):
    """Beams that were preempted find their blocks in host memory; others wait for them."""
    engine = make_engine(7, 4, 9, max_seqs, host_slots=40)
    prompts = {str(i): [1 + i % 2] * (3 + 2 * i) for i in range(5)}
    asked = {name: params(1 + int(name), ignore_eos=True) for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, asked[name])
    for name, output in run(engine).items():
        right(output, prompts[name], asked[name], 28)
    assert engine_stats(engine)["tiers"]["host"]["reads"]["blocks"] > 0


def test_beams_that_copy_in_every_step_keep_nobody_from_loading():
    """With tiers, a copy is no reason to wait unless what is copied may be taken by a load."""
    engine = make_engine(200, 4, 100, 64, host_slots=40)
    for length in range(4, 8):  # at any moment some are within a block
        engine.add_request(str(length), [length] * length, params(4, 24, ignore_eos=True))
    for _ in range(4):
        step(engine)
    engine.add_request("late", [1, 2, 3], greedy(4))
    for _ in range(8):
        if any(output.request_id == "late" for output in step(engine)):
            break
    else:
        raise AssertionError("it is still not answered")
    run(engine)


def test_preempted_at_any_moment():
    choose = random.Random(5)
    prompt, asked = list(range(1, 11)), params(3, 12)
    for _ in range(20):
        engine = make_engine(40, 4, choose.choice([3, 40]))
        engine.add_request("beams", prompt, asked)
        found = []
        while engine.has_unfinished_requests():
            if choose.random() < 0.5 and engine.scheduler.running:
                engine.scheduler.queues.preempt(choose.choice(engine.scheduler.running))
            found += step(engine)
        right(found[0], prompt, asked, 160)


def test_beams_share_their_blocks():
    """As many blocks as one sequence has, and those that hold what the beams have written."""
    engine = make_engine(300, 16, 4000)
    engine.add_request("beams", [i % 47 for i in range(2000)], params(8, 40, ignore_eos=True))
    scheduler, one = engine.scheduler, 125
    while engine.has_unfinished_requests():
        step(engine)
        own = -(-max((s.num_output for s in scheduler.running), default=0) // 16)
        assert scheduler.cache.allocator.num_in_use <= one + 8 * own
    forks = engine_stats(engine)["forks"]
    assert forks["count"] > 7 and forks["shared_blocks"] >= one * forks["count"]
    assert 0 < forks["copied_blocks"] <= forks["count"] + 40


def test_all_copies_of_a_step_are_made_at_once():
    engine = make_engine(100, 4, 1000)
    calls = []
    engine.runner.before_copy = calls.append
    engine.add_request("a", [1, 2, 3, 4, 5], params(4))
    engine.add_request("b", [2, 2, 3, 4, 5, 6], params(4))
    run(engine)
    assert len(calls) == engine.runner.steps
    assert max(map(len, calls)) >= 6  # three forks each share the last block of their prompt


def test_a_dropped_beam_gives_its_blocks_back_at_once():
    engine = make_engine(100, 4, 1000, caching=False)
    engine.add_request("beams", [1, 2, 3], params(4, 20, ignore_eos=True))
    while engine.has_unfinished_requests():
        step(engine)
        held = {b for s in engine.scheduler.running for b in s.table.ids.tolist()}
        assert engine.scheduler.cache.allocator.num_in_use == len(held)
        assert len(engine.scheduler.running) <= 4


def test_an_abort_ends_all_beams():
    for steps in range(1, 6):
        engine = make_engine(12, 4, 6, max_seqs=3)
        engine.add_request("beams", [1, 2, 3, 4, 5], params(5, 20))
        for _ in range(steps):
            step(engine)
        output = engine.abort_request("beams")
        assert {beam.finish_reason for beam in output.outputs} == {"abort"}
        scheduler = engine.scheduler
        assert not (scheduler.running or scheduler.waiting or scheduler.loading)
        check_idle(engine)


def test_with_room_for_less_than_was_asked():
    engine = make_engine(4, 4)
    asked = params(4, 64)
    engine.add_request("beams", [1] * 9, asked)
    output = run(engine)["beams"]
    right(output, [1] * 9, asked, 16)
    assert max(len(beam.token_ids) for beam in output.outputs) <= 7


def test_wider_than_the_vocabulary():
    engine = make_engine(200, 4, 1000, max_seqs=64)
    asked = params(VOCAB + 6, 3)
    engine.add_request("beams", [1], asked)
    output = run(engine)["beams"]
    assert len(output.outputs) == VOCAB + 6
    right(output, [1], asked, 800)


def test_a_request_that_breaks_a_step_takes_its_beams_along():
    engine = make_engine(60, 4, 40)
    engine.add_request("beams", [9, 9, 9, 9], params(4))
    engine.add_request("other", [1, 2, 3], greedy(12))

    def breaks(plan):
        if 9 in plan.token_ids:
            raise RuntimeError("injected")

    step(engine)
    engine.runner.before_launch = lambda plan: breaks(plan) if plan.num_tokens else None
    nines = [s for s in engine.scheduler.running if s.request.id == "beams"]
    assert len(nines) == 4
    nines[0].tokens._ids[nines[0].tokens.count - 1] = 9
    outputs = run(engine)
    assert "failed (RuntimeError)" in outputs["beams"].error
    assert outputs["other"].outputs[0].token_ids == expected([1, 2, 3], 12)


def test_what_beams_cannot_do_is_refused():
    engine = make_engine()
    with pytest.raises(RequestError, match="cannot stream"):
        engine.add_request("beams", [1], params(), stream=True)
    with pytest.raises(RequestError, match="beam_width must be a whole number from 1"):
        BeamSearchParams(beam_width=0)
    with pytest.raises(RequestError, match="True, False or 'never'"):
        BeamSearchParams(early_stopping="always")
    with pytest.raises(RequestError, match="did you mean length_penalty"):
        BeamSearchParams(lenght_penalty=1.0)
    with pytest.raises(RequestError, match="stop_token_ids names token 50"):
        engine.add_request("beams", [1], params(stop_token_ids=[50]))


def test_greedy_neighbours_do_not_change():
    engine = make_engine(60, 4, 40)
    for i in range(4):
        engine.add_request(f"beams-{i}", [1, 2, i], params(3))
        engine.add_request(f"greedy-{i}", [1, 2, i], greedy(12))
    outputs = run(engine)
    for i in range(4):
        assert outputs[f"greedy-{i}"].outputs[0].token_ids[0] == next_token([1, 2, i])
        assert outputs[f"greedy-{i}"].outputs[0].token_ids == expected([1, 2, i], 12)
        right(outputs[f"beams-{i}"], [1, 2, i], params(3), 240)
