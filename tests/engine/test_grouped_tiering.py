"""Tiers and models with several KV groups: device and tiers together make one hit, by one rule."""

from __future__ import annotations

import random

import fake_model
import numpy as np
import pytest
from drafts import ScriptedDrafter, speculate
from fake_model import expected, greedy, make_engine, next_token, run, seen, step
from patience import PATIENCE_S
from plain_hits import plain_hit
from shelf import Shelf

from quire.engine.observe.introspection import engine_stats
from quire.kv.hit_rule import first_needed
from quire.kv.index import GONE
from quire.kv.keys import group_key

GROUPS = [(None, 6, 6), (None, 3, 9), (None, None, 5), (9, 4), (6,), (1,), (None, 1), (1, 6)]
BLOCK = 4
IMAGE = 4 * BLOCK
LONG = [1 + i * i % 7 for i in range(43)]  # ten blocks that can be a hit


pytestmark = pytest.mark.parametrize("windows", GROUPS, indirect=True, ids=str)


def answer(engine, prompt, count=3, **options):
    engine.add_request("x", prompt, greedy(count), **options)
    output = run(engine)["x"]
    assert output.outputs[0].token_ids == expected(prompt, count)
    assert sum(output.cached_tokens_by_tier.values()) == output.num_cached_tokens
    return output


def flush(engine):
    assert engine.scheduler.tiering.store.flush(PATIENCE_S)
    fake_model.check_idle(engine)


def push_out(engine):
    """Forget what the device has, once the tiers have it too."""
    flush(engine)
    engine.scheduler.cache.clear()
    engine.runner.after_step()


def keys_of(engine, tokens):
    """Of all groups' blocks, by group and place."""
    store, cache = engine.scheduler.tiering.store, engine.scheduler.cache
    names = store.names(tokens)
    return {
        (group, place): group_key(name.key, group)
        for group in range(cache.num_groups)
        for place, name in enumerate(names)
    }


def held_by(shelf, engine, tokens):
    return {image for image, key in keys_of(engine, tokens).items() if key in shelf.images}


@pytest.fixture(params=["near", "far"])
def shelf(request):
    return Shelf(IMAGE, is_local=request.param == "near")


@pytest.fixture
def engine(shelf, windows):
    """One whose tier has all that `LONG` and its answer leave there, and its device nothing."""
    engine = make_engine(60, host_slots=0, tiers=[shelf])
    answer(engine, LONG)
    push_out(engine)
    return engine


def test_tiers_have_full_groups_and_the_windows_of_ends(engine, shelf, windows):
    whole = [*LONG, *expected(LONG, 3)]
    held = held_by(shelf, engine, whole)
    for group, window in enumerate(windows):
        places = {place for of_group, place in held if of_group == group}
        needed = {
            place
            for end in (10, 11)  # of the prompt but its last token, and of the answer
            for place in range(first_needed(4 * end, window, 4), end)
        }
        assert places == needed
    for end in (10, 11):
        assert plain_hit(end, windows, 4, lambda group, place: (group, place) in held) == end


def test_one_window_in_a_stride_is_kept(monkeypatch, windows):
    monkeypatch.setattr("quire.kv.kept_windows.STRIDE", 16)
    shelf = Shelf(IMAGE)
    engine = make_engine(60, host_slots=0, tiers=[shelf])
    answer(engine, LONG)
    push_out(engine)
    assert answer(engine, [*LONG[:34], 9, 9, 9]).num_cached_tokens == 32


def test_a_restore_reads_what_the_rule_needs(engine, windows):
    before = engine_stats(engine)["tiers"]["host"]["reads"].copy()
    assert answer(engine, LONG, 1).num_cached_tokens == 40
    reads = engine_stats(engine)["tiers"]["host"]["reads"]
    needed = sum(10 - first_needed(40, window, 4) for window in windows)
    assert reads["blocks"] - before["blocks"] == needed
    assert reads["bytes"] - before["bytes"] == needed * IMAGE


@pytest.mark.parametrize("count", [1, 3, 5])
def test_drafts_ask_for_nothing_that_no_tier_was_given(shelf, windows, count):
    """Drafts keep history beyond a window: what is stored, asked for and loaded is one rule."""
    for wrong in range(count + 1):
        shelf.images.clear()
        engine = make_engine(60, host_slots=0, tiers=[shelf])

        def true_tokens(_, token_ids, most):
            tokens = token_ids.tolist()
            for _ in range(most):
                tokens.append(next_token(seen(tokens)))
            return tokens[len(token_ids) :]

        drafter = ScriptedDrafter(true_tokens, lambda _, place, wrong=wrong: place % 6 == wrong)
        speculate(engine, drafter, count)
        whole = [*LONG, *answer(engine, LONG, 14).outputs[0].token_ids]
        push_out(engine)
        held = held_by(shelf, engine, whole)
        missed = len(shelf.missed)
        for end in (len(LONG), len(whole)):
            prompt = [*whole[:end], 5]
            places = (len(prompt) - 1) // BLOCK
            can = plain_hit(places, windows, BLOCK, lambda group, at: (group, at) in held)  # noqa: B023
            assert answer(engine, prompt).num_cached_tokens == BLOCK * can > 0
            push_out(engine)
        assert len(shelf.missed) == missed  # nothing was read that was not there


@pytest.mark.parametrize("seed", range(6))
def test_device_and_tiers_make_one_hit(engine, shelf, windows, seed):
    """Whatever each of them lacks: the hit is the longest that both can serve together."""
    dice = random.Random(seed)
    answer(engine, LONG)  # the device has all of it again
    flush(engine)
    cache = engine.scheduler.cache
    ids = np.array(LONG, dtype=np.int32)
    for node in cache.index.match("", ids):
        for window in set(windows):
            gone = [b if w == window else -9 for w, b in zip(windows, node.blocks, strict=True)]
            if dice.random() < 0.3 and GONE not in gone:
                cache.withdraw(node, *gone)
    for image, key in keys_of(engine, LONG).items():
        if dice.random() < (0.1 if windows[image[0]] is None else 0.3):
            shelf.images.pop(key, None)
    chain, below = cache.index.match("", ids), held_by(shelf, engine, LONG)

    def has(group, place):
        on_device = place < len(chain) and chain[place].blocks[group] != GONE
        return on_device or (group, place) in below

    hit = plain_hit(10, windows, 4, has)
    output = answer(engine, LONG, 5)
    assert output.num_cached_tokens in range(4 * hit, 4 * hit + 4)  # or part of a cached block


@pytest.mark.parametrize("place", [0, 3, 7, 8, 9])
def test_an_image_that_cannot_be_read_shortens_the_hit(engine, shelf, windows, place):
    """The tier says that it has it, and finds it damaged when it is read."""
    lost = {key for (_, at), key in keys_of(engine, LONG).items() if at == place}
    read = shelf.read

    def drop_and_read(names, images):
        for name in names:
            if name.key in lost:
                shelf.images.pop(name.key, None)
        return read(names, images)

    shelf.read = drop_and_read
    below = held_by(shelf, engine, LONG)
    needed = place >= min(first_needed(40, window, 4) for window in windows)
    hit = plain_hit(10, windows, 4, lambda group, at: (group, at) in below and at != place)
    output = answer(engine, LONG, 5)
    assert output.num_cached_tokens == (4 * hit if needed else 40)
    assert answer(engine, LONG, 5).num_cached_tokens >= 40


def test_a_tier_that_promises_and_never_reads_is_asked_a_few_times(engine, shelf):
    reads = []

    def fail(names, images):
        reads.append(len(names))
        return [False] * len(names)

    shelf.read = fail
    assert answer(engine, LONG).num_cached_tokens == 0
    assert 0 < len(reads) <= 3 * 3


def test_of_a_tier_of_unknown_speed_the_shortest_hit_is_tried(engine, windows):
    """Where windows leave no short one, that is all of it."""
    rates = engine.scheduler.tiering.store.rates
    rates.observe("prefill", 1000, 1.0)
    assert answer(engine, LONG).num_cached_tokens == 40


def test_waiting_requests_are_prefetched(windows):
    shelf = Shelf(IMAGE)
    prompts = [[seed, *LONG] for seed in range(8, 11)]
    first = make_engine(60, host_slots=0, tiers=[shelf])
    for prompt in prompts:
        answer(first, prompt)
    push_out(first)
    engine = make_engine(60, host_slots=200, tiers=[shelf], max_seqs=1)
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt, greedy(3))
    outputs = run(engine)
    found = [outputs[str(at)].cached_tokens_by_tier for at in range(3)]
    assert found[0] == {"ssd": 40} and found[2] in ({"host": 40}, {"ssd": 40})
    for at, prompt in enumerate(prompts):
        assert outputs[str(at)].outputs[0].token_ids == expected(prompt, 3)
    keys = keys_of(engine, prompts[2]).items()
    below = {image for image, key in keys if engine.scheduler.tiering.store.host.contains([key])[0]}
    assert plain_hit(10, windows, 4, lambda group, place: (group, place) in below) == 10


def test_an_answer_goes_on_in_a_later_prompt(engine):
    prompt = [*LONG, *expected(LONG, 3), 5, 6, 7]
    assert answer(engine, prompt).num_cached_tokens == 44


def test_a_look_up_is_dropped_when_the_device_has_it_all_meanwhile(monkeypatch, windows):
    shelf = Shelf(IMAGE, is_local=False)
    engine = make_engine(60, host_slots=200, tiers=[shelf])
    shelf.gate.clear()
    monkeypatch.setattr("quire.kv.store.ASK_DEADLINE_S", PATIENCE_S)
    engine.add_request("waits", LONG, greedy(3))
    step(engine)
    assert len(engine.scheduler.tiering._matches) == 1
    monkeypatch.setattr("quire.kv.store.ASK_DEADLINE_S", 0)
    engine.add_request("computes", [*LONG, 9], greedy(3))
    outputs, scheduler = {}, engine.scheduler
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in step(engine))
        assert not set(scheduler.running) & set(scheduler.tiering._matches)
    shelf.gate.set()
    assert outputs["waits"].outputs[0].token_ids == expected(LONG, 3)
    assert outputs["waits"].num_cached_tokens >= 40


def test_a_prompt_that_another_engine_has_computed_is_handed_over(windows):
    """Its windows end where the next engine goes on, however slow loading would be."""
    shelf = Shelf(IMAGE, is_local=False)
    first = make_engine(60, host_slots=0, tiers=[shelf])
    answer(first, LONG, 1)
    flush(first)
    second = make_engine(60, host_slots=0, tiers=[shelf])
    second.scheduler.tiering.store.rates.observe("ssd", 1, 1.0)
    second.scheduler.tiering.store.rates.observe("prefill", 1000, 1.0)
    assert answer(second, LONG).num_cached_tokens == 0
    push_out(second)
    output = answer(second, LONG, handed_over=True)
    assert output.cached_tokens_by_tier == {"ssd": 40}
