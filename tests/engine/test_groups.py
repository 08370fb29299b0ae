"""Engines whose models have several KV groups: the same answers, with what windows save."""

from itertools import pairwise

import fake_model
import pytest
from drafts import ScriptedDrafter, speculate
from fake_model import expected, greedy, make_engine, next_token, run, seen, step
from plain_hits import plain_hit

from quire.engine.observe.introspection import block as view_of_block
from quire.engine.observe.introspection import engine_stats

BOTH_WAYS = pytest.mark.parametrize("overlap", [False, True], indirect=True)
GROUPS = [(None, 6, 6), (None, 3, 9), (9, 4)]
LONG = [1 + i * i % 7 for i in range(40)]


@pytest.fixture(params=GROUPS, ids=lambda windows: "-".join(map(str, windows)))
def windows(request):
    fake_model.WINDOWS.append(request.param)
    yield request.param
    fake_model.WINDOWS.pop()


def ask(engine, name, prompt, count, **options):
    engine.add_request(name, prompt, greedy(count), **options)


def answer(engine, name="x", prompt=LONG, count=3):
    ask(engine, name, prompt, count)
    return run(engine)[name]


@BOTH_WAYS
@pytest.mark.parametrize("budget", [3, 16])
def test_a_window_holds_no_more_than_its_reach(windows, overlap, budget):
    engine = make_engine(40, 4, budget)
    ask(engine, "x", LONG, 60)
    held = []
    while engine.has_unfinished_requests():
        outputs = step(engine)
        for sequence in engine.scheduler.running:
            held.append([len(table) for table in sequence.table.groups])
    assert outputs[0].outputs[0].token_ids == expected(LONG, 60)
    for window, counts in zip(windows, zip(*held, strict=True), strict=True):
        reach = -(-(window or 100) // 4) + 1
        assert max(counts) <= (25 if window is None else reach + -(-2 * budget // 4))
        assert held[-1][windows.index(window)] <= reach + 1


def test_hits_end_inside_and_beyond_a_window(windows):
    """Every length up to three windows."""
    for length in range(28):
        engine = make_engine(60, 4, 64)
        answer(engine, "first", LONG[:30], 4)
        prompt = [*LONG[:length], 20, 21, 22]
        found = answer(engine, "again", prompt, 5)
        assert found.outputs[0].token_ids == expected(prompt, 5)
        assert found.num_cached_tokens == length


@pytest.mark.parametrize("gap", range(10))
def test_a_hit_is_as_long_as_all_groups_allow(windows, gap):
    """Each window lacks a block, a different one: the longest prefix that all can serve."""
    engine = make_engine(60, 4, 64)
    answer(engine, "first", LONG, 2)
    cache = engine.scheduler.cache
    chain = cache.index.match("", fake_model.np.array(LONG, dtype="int32"))
    for group, window in enumerate(windows):
        if window is not None:
            node = chain[(gap + 2 * group) % 10]
            cache.withdraw(node, *[b if g == group else -9 for g, b in enumerate(node.blocks)])
    hit = plain_hit(9, windows, 4, lambda group, place: chain[place].blocks[group] >= 0)
    found = answer(engine, "again", LONG, 5)
    assert found.outputs[0].token_ids == expected(LONG, 5)
    assert found.num_cached_tokens in range(4 * hit, 4 * hit + 4)
    if hit < 9:
        assert found.miss_reason is not None and "had to make room" in found.miss_reason
    assert answer(engine, "filled again", LONG, 5).num_cached_tokens == 39


def test_a_prefix_returns_after_pressure_round_after_round(windows):
    """Twenty rounds in a pool that is too small for both; freed blocks are poisoned."""
    engine = make_engine(14, 4, 16, 4)
    for i in range(20):
        prefix = answer(engine, f"prefix {i}", LONG[:30], 6)
        assert prefix.outputs[0].token_ids == expected(LONG[:30], 6)
        for j in range(3):
            ask(engine, f"{j}", [30 + i, j, *LONG[:40]], 5)
        for j, other in run(engine).items():
            assert other.outputs[0].token_ids == expected([30 + i, int(j), *LONG[:40]], 5)
    assert engine.scheduler.cache.allocator.num_evicted > 100


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_drafts_that_are_wrong_anywhere(windows, count):
    for wrong in range(count + 2):
        engine = make_engine(40, 4, 32)

        def true_tokens(_, token_ids, most):
            tokens = token_ids.tolist()
            for _ in range(most):
                tokens.append(next_token(seen(tokens)))
            return tokens[len(token_ids) :]

        def is_spoilt(_, place, wrong=wrong):
            return place % (count + 1) == wrong

        speculate(engine, ScriptedDrafter(true_tokens, is_spoilt), count)
        for name in "ab":
            ask(engine, name, [*LONG[:11], ord(name) % 40], 30)
        for name, output in run(engine).items():
            prompt = [*LONG[:11], ord(name) % 40]
            assert output.outputs[0].token_ids == expected(prompt, 30)
        again = answer(engine, "again", [*LONG[:11], 17], 30)
        assert again.outputs[0].token_ids == expected([*LONG[:11], 17], 30)


@BOTH_WAYS
def test_preempted_at_any_token(windows, overlap):
    for when in range(1, 30, 2):
        engine = make_engine(30, 4, 8, 3)
        for name in "ab":
            ask(engine, name, LONG[: 20 + ord(name) % 7], 15)
        for _ in range(when):
            step(engine)
        engine.scheduler.queues.preempt_youngest()
        for name, output in run(engine).items():
            assert output.outputs[0].token_ids == expected(LONG[: 20 + ord(name) % 7], 15)


@BOTH_WAYS
def test_samples_fork_behind_a_long_prompt(windows, overlap):
    engine = make_engine(60, 4, 16, 8)
    engine.add_request("x", LONG[:22], greedy(12, n=4))
    output = run(engine)["x"]
    assert [sample.token_ids for sample in output.outputs] == [expected(LONG[:22], 12)] * 4
    assert engine_stats(engine)["forks"]["copied_blocks"] >= 3 * len(windows)


@BOTH_WAYS
def test_what_is_being_computed_is_waited_for(windows, overlap):
    """A later request with the same prompt computes no more than its end."""
    engine = make_engine(60, 4, 8)
    ask(engine, "a", LONG, 4)
    step(engine)
    ask(engine, "b", [*LONG, 9, 9], 4)
    outputs = run(engine)
    assert outputs["b"].outputs[0].token_ids == expected([*LONG, 9, 9], 4)
    assert outputs["b"].num_cached_tokens >= 36


@BOTH_WAYS
def test_windows_alone_hold_sequences_longer_than_the_pool(overlap):
    fake_model.WINDOWS.append((9, 4))
    engine = make_engine(8, 4, 5, 2, max_len=400)
    assert engine.model.max_model_len == 400
    for name in "ab":
        ask(engine, name, [ord(name) % 9, *LONG * 3], 60)
    for name, output in run(engine).items():
        assert output.outputs[0].token_ids == expected([ord(name) % 9, *LONG * 3], 60)
    fake_model.WINDOWS.pop()


def test_a_block_of_a_window_shows_its_own_place_and_tokens(windows):
    engine = make_engine(40, 4, 64)
    ask(engine, "x", LONG, 30)
    for _ in range(12):
        step(engine)
    [sequence] = engine.scheduler.running
    for table in sequence.table.groups:
        for place, block in enumerate(table.ids.tolist(), table.first):
            shown = view_of_block(engine, block)
            assert shown["requests"] == [{"request": "x", "sample": 0, "place": place}]
            assert shown["tokens"] == min(4, sequence.num_computed - 4 * place)
    stats = engine_stats(engine)["blocks"]
    assert stats["in_use"] == len(sequence.table)
    assert stats["empty_slots"] == len(windows) * (-sequence.table.length % 4)
    run(engine)


def test_the_firsts_of_a_sequence_never_go_back(windows):
    engine = make_engine(40, 4, 7)
    ask(engine, "x", LONG, 20)
    firsts = []
    while engine.has_unfinished_requests():
        step(engine)
        firsts += [[t.first for t in s.table.groups] for s in engine.scheduler.running]
    for before, after in pairwise(firsts):
        assert all(a <= b for a, b in zip(before, after, strict=True))
    assert [first > 0 for first in firsts[-1]] == [window is not None for window in windows]
