import numpy as np
import pytest
from fake_model import expected, greedy, make_engine, run, step

from quire.engine.adapters.no_slots import NoSlots
from quire.errors import RequestError
from quire.params import SamplingParams


def tokens_of(outputs):
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def test_a_request_runs_to_its_end():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(10))
    assert tokens_of(run(engine)) == {"a": expected([1, 2, 3], 10)}


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_chunks_of_any_size_give_the_same_tokens(budget, block_size):
    engine = make_engine(num_blocks=128 // block_size, block_size=block_size, budget=budget)
    prompts = {str(i): list(range(1, 4 + 5 * i)) for i in range(5)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(6))
    assert tokens_of(run(engine)) == {n: expected(p, 6) for n, p in prompts.items()}


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("cached", [0, 3, 4, 8, "all"])
def test_block_edges_warm_and_cold(length, cached):
    engine = make_engine()
    prompt = list(range(1, length + 1))
    head = prompt if cached == "all" else prompt[:cached]
    if head:
        engine.add_request("head", head, greedy(1))
        run(engine)
    engine.add_request("a", prompt, greedy(9))
    out = run(engine)["a"]
    assert out.outputs[0].token_ids == expected(prompt, 9)
    assert out.num_cached_tokens == min(len(head) // 4 * 4, length - 1)


def test_decodes_go_first_so_a_long_prompt_freezes_nobody():
    engine = make_engine(num_blocks=600, budget=20, max_seqs=17)
    for i in range(16):
        engine.add_request(f"stream {i}", [i + 1], greedy(60, seed=i))
    step(engine)
    engine.add_request("long", (np.arange(600) % 49 + 1).tolist(), greedy(1))
    sizes = {s.request.id: s.num_output for s in engine.scheduler.running}
    done = []
    while "long" not in done:
        done += [output.request_id for output in step(engine)]
        for sequence in engine.scheduler.running:
            if sequence.request.id in sizes:
                assert sequence.num_output == sizes[sequence.request.id] + 1
                sizes[sequence.request.id] += 1
    run(engine)


def test_a_common_prefix_that_arrives_in_one_batch_is_computed_once():
    engine = make_engine(num_blocks=64, budget=1000)
    prefix = list(range(1, 41))
    for i in range(6):
        engine.add_request(str(i), [*prefix, 41 + i, 42], greedy(4))
    outputs = run(engine)
    assert engine.runner.plans[0].num_tokens == 42 + 5 * 2
    assert [outputs[str(i)].num_cached_tokens for i in range(6)] == [0, 40, 40, 40, 40, 40]
    assert tokens_of(outputs) == {str(i): expected([*prefix, 41 + i, 42], 4) for i in range(6)}


@pytest.mark.parametrize("budget", [4, 6, 10, 17])
def test_a_common_prefix_longer_than_a_step_is_computed_once(budget):
    engine = make_engine(num_blocks=64, budget=budget)
    prefix = list(range(1, 41))
    for i in range(4):
        engine.add_request(str(i), [*prefix, 41 + i], greedy(1))
    outputs = run(engine)
    assert engine.runner.computed == 40 + 4
    assert tokens_of(outputs) == {str(i): expected([*prefix, 41 + i], 1) for i in range(4)}


def test_identical_prompts_in_one_batch_share_and_stay_right():
    engine = make_engine(num_blocks=32, budget=100)
    for i in range(4):
        engine.add_request(str(i), list(range(1, 13)), greedy(8))
    assert set(map(tuple, tokens_of(run(engine)).values())) == {tuple(expected(range(1, 13), 8))}


def test_caching_off_finds_nothing():
    engine = make_engine(caching=False)
    for name in "ab":
        engine.add_request(name, list(range(1, 13)), greedy(3))
        out = run(engine)[name]
        assert out.num_cached_tokens == 0 and out.miss_reason == "prefix caching is off"
    assert engine.scheduler.cache.allocator.num_free == 16


def test_salts_share_nothing_and_equal_salts_do():
    engine = make_engine()
    hits = []
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x"), ("d", "")]:
        engine.add_request(name, list(range(1, 13)), greedy(1), cache_salt=salt)
        hits.append(run(engine)[name].num_cached_tokens)
    assert hits == [0, 0, 11, 0]


def test_a_pool_of_two_blocks():
    engine = make_engine(num_blocks=2, block_size=4)
    with pytest.raises(RequestError, match="context length is 8 tokens"):
        engine.add_request("never", list(range(1, 10)), greedy(1))
    engine.add_request("a", [1, 2, 3], greedy(5))
    engine.add_request("b", [4, 5, 6], greedy(5))
    out = tokens_of(run(engine))
    assert out == {"a": expected([1, 2, 3], 5), "b": expected([4, 5, 6], 5)}


def test_output_ends_at_max_model_len():
    engine = make_engine(num_blocks=2, block_size=4)
    engine.add_request("a", [1, 2, 3], greedy(500))
    out = run(engine)["a"].outputs[0]
    assert out.finish_reason == "length" and out.token_ids == expected([1, 2, 3], 5)


@pytest.mark.parametrize("num_blocks", [9, 12, 20])
def test_preempted_many_times_gives_the_same_tokens(num_blocks):
    engine = make_engine(num_blocks=num_blocks, budget=16)
    prompts = {str(i): [i + 1] * (3 + i) for i in range(7)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(20))
    assert tokens_of(run(engine)) == {n: expected(p, 20) for n, p in prompts.items()}
    assert engine.scheduler.queues.num_preemptions > 0


@pytest.mark.parametrize("at", range(1, 14))
@pytest.mark.parametrize("n", [1, 3])
def test_preempted_at_every_token(at, n):
    params = SamplingParams(n=n, max_tokens=12, seed=5, ignore_eos=True)

    def play(preempt):
        engine = make_engine(num_blocks=64)
        engine.add_request("a", [1, 2, 3, 4, 5], params)
        engine.add_request("b", [9, 8], greedy(12))
        for i in range(at + 40):
            if preempt and i >= at and engine.scheduler.running:
                engine.scheduler.queues.preempt(engine.scheduler.running[-1])
            if not engine.has_unfinished_requests():
                break
            for output in step(engine):
                if output.request_id == "a":
                    return [o.token_ids for o in output.outputs]

    assert play(preempt=True) == play(preempt=False)


def test_the_cheapest_to_restore_is_preempted():
    engine = make_engine(num_blocks=12, budget=100)
    engine.add_request("old", [1] * 9, greedy(30))
    engine.add_request("long", [2] * 17, greedy(30))
    engine.add_request("short", [3] * 5, greedy(30))
    while not engine.scheduler.queues.num_preemptions:
        step(engine)
    assert [s.request.id for s in engine.scheduler.waiting] == ["short"]
    run(engine)


def test_n_samples_share_the_prompt_and_copy_its_last_block():
    engine = make_engine(num_blocks=32)
    params = SamplingParams(n=4, max_tokens=6, seed=3, ignore_eos=True)
    engine.add_request("a", list(range(1, 11)), params)  # 2 full blocks and 2 tokens
    step(engine)
    assert engine.scheduler.cache.allocator.num_in_use == 3
    while len(engine.scheduler.running) < 4:  # overlapped, they fork a step later
        step(engine)
    if engine.scheduler.cache.allocator.num_in_use == 3:
        step(engine)
    assert engine.scheduler.cache.allocator.num_in_use == 3 + 3
    out = run(engine)["a"]
    assert [o.index for o in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in out.outputs}) > 1
    assert all(len(o.token_ids) == 6 for o in out.outputs)


def test_more_samples_than_fit_at_once():
    def texts(max_seqs):
        engine = make_engine(num_blocks=64, max_seqs=max_seqs)
        params = SamplingParams(n=6, max_tokens=5, seed=3, ignore_eos=True)
        engine.add_request("a", list(range(1, 11)), params)
        return [o.token_ids for o in run(engine)["a"].outputs]

    assert texts(2) == texts(8)


def test_a_budget_below_max_num_seqs_works_and_takes_turns():
    engine = make_engine(num_blocks=64, budget=3, max_seqs=8)
    for i in range(8):
        engine.add_request(str(i), [i + 1], greedy(9))
    assert tokens_of(run(engine)) == {str(i): expected([i + 1], 9) for i in range(8)}


def test_priority_goes_first():
    engine = make_engine(max_seqs=1, policy="priority")
    ended = []
    for name, priority in [("low", 5), ("high", 0), ("middle", 2)]:
        engine.add_request(name, [1, 2], greedy(3), priority=priority)
    while engine.has_unfinished_requests():
        ended += [o.request_id for o in step(engine)]
    assert ended == ["high", "middle", "low"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "cache-aware"])
@pytest.mark.parametrize("places", [{"max_seqs": 2}, {"num_blocks": 7}], ids=str)
def test_background_requests_give_up_their_places(policy, places):
    """Be it places or blocks that are short: what comes later and waits is admitted at once."""
    engine = make_engine(policy=policy, **places)
    for i in range(3):
        engine.add_request(f"background {i}", [i + 1] * 8, greedy(6), background=True)
    step(engine)
    step(engine)
    for i in range(3):
        engine.add_request(str(i), [i + 11] * 8, greedy(6))
    outputs, steps = {}, 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0].token_ids for output in step(engine)}
        steps += 1
        if steps > 3 and any(not each.request.is_background for each in engine.scheduler.waiting):
            assert not any(each.request.is_background for each in engine.scheduler.running)
    assert outputs == {str(i): expected([i + 11] * 8, 6) for i in range(3)} | {
        f"background {i}": expected([i + 1] * 8, 6) for i in range(3)
    }


@pytest.mark.parametrize("policy", ["fcfs", "priority", "cache-aware"])
def test_background_requests_come_in_their_turn(policy):
    """Two batches, the second of which came when all of the first was waiting."""
    engine = make_engine(max_seqs=1, policy=policy)
    for batch in ("a", "b"):
        for turn in range(3):
            prompt = [ord(batch) % 7 + turn] * 3
            engine.add_request(f"{batch}{turn}", prompt, greedy(2), background=True, turn=turn)
    engine.add_request("first", [5] * 3, greedy(2))
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in step(engine)]
    assert ended == ["first", "a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_batch_alone_is_not_searched_for_places():
    """Neither what waits nor what runs is walked through in a step that could change nothing."""

    class Unwalked(NoSlots):
        def first(self, queues):
            raise AssertionError("the queue was walked")

    engine = make_engine(max_seqs=2)
    engine.scheduler.preemption.slots = Unwalked()
    for i in range(4):
        engine.add_request(str(i), [i + 1] * 8, greedy(3), background=True)
    assert tokens_of(run(engine)) == {str(i): expected([i + 1] * 8, 3) for i in range(4)}


def test_a_background_request_is_preempted_before_any_other():
    """Though it is the first to have come, and has the most to lose."""
    engine = make_engine(num_blocks=12)
    engine.add_request("background", [9] * 16, greedy(12), background=True)
    step(engine)
    for i in range(2):
        engine.add_request(str(i), [i + 1] * 8, greedy(12))
    seen = set()
    while engine.has_unfinished_requests():
        step(engine)
        seen |= {each.request.id for each in engine.scheduler.waiting}
    assert seen == {"background"}


def test_cache_aware_takes_the_longest_cached_prefix_and_nobody_starves():
    engine = make_engine(num_blocks=64, max_seqs=1, policy="cache-aware")
    warm = list(range(1, 33))
    engine.add_request("warm", warm, greedy(1))
    run(engine)
    engine.add_request("cold", [40] * 10, greedy(1))
    ended = []
    for i in range(40):
        engine.add_request(f"hit {i}", [*warm, 40 + i % 9], greedy(1))
        ended += [o.request_id for o in step(engine)]
    assert ended[0].startswith("hit")
    assert "cold" in ended
    run(engine)


def test_abort_frees_at_once_wherever_the_request_is():
    engine = make_engine(num_blocks=32, max_seqs=2)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], greedy(50))
    step(engine)
    in_use = engine.scheduler.cache.allocator.num_in_use
    aborted = engine.abort_request("a")
    waiting = engine.abort_request("c")
    assert engine.abort_request("nobody") is None
    assert engine.scheduler.cache.allocator.num_in_use < in_use
    outputs = run(engine)
    assert aborted.outputs[0].finish_reason == "abort" and aborted.finished
    assert waiting.outputs[0].token_ids == []
    assert outputs["b"].outputs[0].token_ids == expected([1, 2, 3], 50)


def test_end_of_text_ends_a_request_and_is_kept():
    engine = make_engine()
    prompt = next(
        [a, b] for a in range(1, 50) for b in range(1, 50) if expected([a, b], 30, (0,))[-1] == 0
    )
    engine.add_request("a", prompt, greedy(30, ignore_eos=False))
    out = run(engine)["a"].outputs[0]
    assert out.finish_reason == "stop" and out.token_ids == expected(prompt, 30, (0,))


def test_a_resumed_sequence_walks_only_its_new_tail():
    engine = make_engine(num_blocks=64)
    engine.add_request("a", list(range(1, 33)), greedy(20))
    engine.add_request("b", [40], greedy(20))
    for _ in range(6):
        step(engine)
    sequence = engine.scheduler.running[0]
    engine.scheduler.queues.preempt(sequence)
    sequence.tokens.ids[:32] = 49  # if it looked at these tokens again it would miss
    nodes = engine.scheduler.prefixes.match(sequence)
    assert len(nodes) == 9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_salt": 5}, "cache_salt is a string"),
        ({"priority": "high"}, "priority is a whole number"),
        ({"priority": 1}, "scheduling_policy='priority'"),
    ],
)
def test_bad_options_are_refused(options, says):
    engine = make_engine()
    with pytest.raises(RequestError, match=says):
        engine.add_request("a", [1, 2, 3], greedy(2), **options)
    assert not engine.has_unfinished_requests()


def test_any_string_is_a_salt():
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, list(range(1, 9)), greedy(2), cache_salt="\ud800")
        cached = run(engine)[name].num_cached_tokens
    assert cached == 7


def test_best_of_cannot_stream():
    engine = make_engine()
    params = SamplingParams(n=1, best_of=2, max_tokens=2)
    with pytest.raises(RequestError, match="cannot stream"):
        engine.add_request("a", [1], params, stream=True)
