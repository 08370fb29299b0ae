"""An adapter that waits takes the slot of one that runs, and no answer is another one for it."""

import pytest
from adapted_runner import AdaptedRunner, expected_with, lora
from fake_model import greedy, make_engine, run, step

from quire.engine.adapters.exchange import LEAST_GAIN, STEPS_BETWEEN

PROMPT = [1, 2, 3, 4, 5]
CONTENTS = {"a": 1, "b": 2, "c": 3, "d": 4}
BLOCK_SIZE = 4
ALONE = 2 * LEAST_GAIN  # steps of an adapter, where three share two slots
EVENLY = 3 * ALONE // 2  # steps that all have to do, shared out
LATE = 2 * STEPS_BETWEEN + 8  # steps that are lost by looking now and then, and by beginning again


def engine_with(slots=2, quiet_steps=0, **more):
    engine = make_engine(
        runner_class=AdaptedRunner,
        adapter_slots=slots,
        **{"num_blocks": 512, "block_size": BLOCK_SIZE, "windows": (None,), **more},
    )
    engine.runner.folders = {lora(name).lora_path: each for name, each in CONTENTS.items()}
    engine.scheduler.exchange.quiet_steps = quiet_steps
    for name in CONTENTS:
        engine.adapters.find(lora(name)).wait(60)
    return engine


def ask(engine, name, max_tokens=ALONE, **more):
    """By one request of the adapter's own name."""
    params = greedy(max_tokens)
    engine.add_request(name, PROMPT, params, lora_request=lora(name), **more)


def preemptions(engine):
    return engine.scheduler.queues.num_preemptions


def run_until_exchanged(engine):
    while not preemptions(engine):
        step(engine)


def test_three_adapters_share_two_slots_evenly():
    engine = engine_with()
    for name in "abc":
        ask(engine, name)
    outputs = run(engine)
    assert EVENLY <= engine.runner.steps <= EVENLY + LATE
    assert engine.adapters.slots.num_loads == 3 + preemptions(engine)
    for name in "abc":
        expected = expected_with(CONTENTS[name], PROMPT, ALONE)
        assert outputs[name].outputs[0].token_ids == expected


def test_hardly_a_token_is_computed_twice():
    engine = engine_with()
    for name in "abc":
        ask(engine, name)
    run(engine)
    needed = 3 * (len(PROMPT) + ALONE - 1)
    assert needed < engine.runner.computed <= needed + preemptions(engine) * BLOCK_SIZE


def test_all_sequences_of_an_adapter_give_way_together():
    engine = engine_with()
    for name in "abc":
        engine.add_request(name, PROMPT, greedy(ALONE, n=2), lora_request=lora(name))
    outputs = run(engine)
    assert preemptions(engine) and preemptions(engine) % 2 == 0
    for name in "abc":
        expected = expected_with(CONTENTS[name], PROMPT, ALONE)
        assert [each.token_ids for each in outputs[name].outputs] == [expected] * 2


def test_none_gives_way_while_requests_come():
    """No slot will be empty soon; the requests need not have the adapters that wait."""
    engine = engine_with(quiet_steps=16)
    for name in "abc":
        ask(engine, name)
    for number in range(ALONE):
        if number % 12 == 0:
            engine.add_request(f"b {number}", PROMPT, greedy(2), lora_request=lora("b"))
        step(engine)
        assert preemptions(engine) == 0
    engine = engine_with(quiet_steps=16)
    for name in "abc":
        ask(engine, name)
    run_until_exchanged(engine)


def test_no_stream_is_halted():
    engine = engine_with()
    for name in "abc":
        ask(engine, name, stream=True)
    run(engine)
    assert not preemptions(engine)


def test_none_gives_way_without_a_prefix_cache():
    engine = engine_with(caching=False)
    for name in "abc":
        ask(engine, name)
    run(engine)
    assert preemptions(engine) == 0 and engine.adapters.slots.num_loads == 3


def test_none_gives_way_where_there_is_no_room_for_both():
    """The pool has blocks for two answers, and the third prompt is half as long as one."""
    both = 2 * (len(PROMPT) + ALONE) // BLOCK_SIZE
    engine = engine_with(num_blocks=both + 6, max_len=2 * ALONE)
    ask(engine, "a")
    ask(engine, "b")
    long_prompt = [7] * ALONE
    engine.add_request("c", long_prompt, greedy(ALONE - 8), lora_request=lora("c"))
    run(engine)
    assert preemptions(engine) == 0 and engine.adapters.slots.num_loads == 3


@pytest.mark.parametrize("lower", [{"priority": 1}, {"background": True}])
def test_none_gives_way_to_what_ranks_lower(lower):
    engine = engine_with(policy="priority")
    ask(engine, "a")
    ask(engine, "b")
    ask(engine, "c", **lower)
    run(engine)
    assert preemptions(engine) == 0 and engine.adapters.slots.num_loads == 3


def test_none_gives_way_to_one_that_can_wait():
    """It has more to do than one that runs, and will have ended before the other."""
    engine = engine_with()
    for name, share in {"a": 6, "b": 1, "c": 3}.items():
        ask(engine, name, share * LEAST_GAIN)
    run(engine)
    assert preemptions(engine) == 0 and engine.runner.steps <= 6 * LEAST_GAIN + LATE


def test_the_slot_is_for_others_if_nobody_wants_it_any_more():
    engine = engine_with()
    for name in "abc":
        ask(engine, name)
    while not preemptions(engine):
        step(engine)
        engine.scheduler.exchange.plan(0)  # and so, before any step in which it could begin
    engine.abort_request("c")
    run(engine)
    assert engine.runner.steps <= ALONE + LATE


def test_the_one_that_waits_goes_before_the_one_that_gave_way():
    """Though that one has come first: the slot is kept until its sequences begin."""
    engine = engine_with(budget=3)
    for name in "abc":
        ask(engine, name)
    run_until_exchanged(engine)
    for _ in range(len(PROMPT)):
        step(engine)
    running = {sequence.request.id for sequence in engine.scheduler.running}
    assert "c" in running and len(running) == 2


def test_newcomers_starve_nobody():
    """There is always one with more to do than both others, which ends long before its bound."""
    engine = engine_with(max_len=1024)
    ask(engine, "a", 100)
    ask(engine, "b", 600)
    ended, stay = set(), 40
    for number in range(200):
        if number % stay == 0:
            engine.abort_request(f"newcomer {number - stay}")
            name = lora("cd"[number // stay % 2])
            engine.add_request(f"newcomer {number}", PROMPT, greedy(900), lora_request=name)
        ended |= {output.request_id for output in step(engine)}
        if "a" in ended:
            break
    assert preemptions(engine)
    assert engine.runner.steps <= 100 + stay + LATE
