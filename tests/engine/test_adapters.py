"""Adapters in the engine: prepared, placed in slots, kept apart, read again, unloaded."""

import threading

import pytest
from adapted_runner import AdaptedRunner, expected_with, fingerprint_of, lora
from fake_model import greedy, make_engine, run, step
from patience import PATIENCE_S

from quire.errors import RequestError
from quire.replicas.prompt_keys import prompt_keys
from quire.request_options import RequestOptions
from quire.runner.plan import AdapterInfo

PROMPT = list(range(1, 14))


def engine_with(*contents, slots=2, host=64, **more):
    """Folders a, b, c, … with these contents."""
    engine = make_engine(
        runner_class=AdaptedRunner,
        adapter_slots=slots,
        host_adapters=host,
        **{"num_blocks": 64, "windows": (None,), **more},
    )
    engine.runner.folders = {
        lora(name).lora_path: each for name, each in zip("abcdefgh", contents, strict=False)
    }
    return engine


def ask(engine, name, adapter=None, prompt=PROMPT, max_tokens=4, **more):
    engine.add_request(name, prompt, greedy(max_tokens), lora_request=adapter, **more)


def answer(engine, name, adapter=None, **more):
    ask(engine, name, adapter, **more)
    return run(engine)[name]


def first_tokens(output):
    return output.outputs[0].token_ids


def test_each_request_has_the_answer_of_its_adapter():
    engine = engine_with(1, 2)
    for name, adapter in [("base", None), ("a", lora("a")), ("b", lora("b"))]:
        ask(engine, name, adapter)
    outputs = run(engine)
    for name, contents in [("base", 0), ("a", 1), ("b", 2)]:
        assert first_tokens(outputs[name]) == expected_with(contents, PROMPT, 4)


def test_a_step_says_which_slot_each_sequence_has():
    engine = engine_with(1, 2)
    answer(engine, "base")
    assert all(len(plan.adapter_slots) == 0 for plan in engine.runner.plans)
    ask(engine, "base again")
    ask(engine, "a", lora("a"), max_tokens=8)
    engine.adapters.find(lora("a")).wait()  # else the base may have ended before it is read
    run(engine)
    slots = {tuple(plan.adapter_slots.tolist()) for plan in engine.runner.plans}
    assert slots >= {(), (0,)} and slots & {(-1, 0), (0, -1)}


def test_blocks_are_found_under_the_same_contents_alone():
    engine = engine_with(1, 2, 1)
    assert answer(engine, "1", lora("a")).num_cached_tokens == 0
    assert answer(engine, "2").num_cached_tokens == 0
    assert answer(engine, "3", lora("b")).num_cached_tokens == 0
    assert answer(engine, "4", lora("a")).num_cached_tokens == 12
    assert answer(engine, "5", lora("c")).num_cached_tokens == 12  # the same under another name
    assert answer(engine, "6").num_cached_tokens == 12
    assert answer(engine, "7", lora("a"), cache_salt="x").num_cached_tokens == 0


def test_no_salt_imitates_an_adapter():
    engine = engine_with(1)
    answer(engine, "1", lora("a"))
    for salt in (fingerprint_of(1), f"x{fingerprint_of(1)}"):
        assert answer(engine, salt, cache_salt=salt).num_cached_tokens == 0
    with pytest.raises(RequestError, match="U\\+0000"):
        ask(engine, "2", cache_salt=f"\0{fingerprint_of(1)}")


def test_blocks_of_an_adapter_come_back_from_a_lower_tier():
    engine = engine_with(1, 2, host_slots=32)
    answer(engine, "1", lora("a"))
    engine.scheduler.tiering.wait_for_copies(10)
    engine.scheduler.cache.clear()
    engine.runner.after_step()
    assert answer(engine, "2", lora("b")).num_cached_tokens == 0
    output = answer(engine, "3", lora("a"))
    assert output.cached_tokens_by_tier == {"host": 12}
    assert first_tokens(output) == expected_with(1, PROMPT, 4)


def test_others_go_on_while_a_folder_is_read():
    engine = engine_with(1)
    engine.runner.may_read.clear()
    ask(engine, "a", lora("a"))
    ask(engine, "base")
    outputs = {}
    while "base" not in outputs:
        outputs |= {output.request_id: output for output in step(engine)}
    assert engine.num_waiting == 1 and "a" not in outputs
    engine.runner.may_read.set()
    assert first_tokens(run(engine)["a"]) == expected_with(1, PROMPT, 4)


def test_a_request_is_aborted_while_its_folder_is_read():
    engine = engine_with(1, 2)
    engine.runner.may_read.clear()
    ask(engine, "gone", lora("a"))
    step(engine)
    assert engine.abort_request("gone").outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests()
    engine.runner.may_read.set()
    assert first_tokens(answer(engine, "b", lora("b"))) == expected_with(2, PROMPT, 4)
    assert first_tokens(answer(engine, "a", lora("a"))) == expected_with(1, PROMPT, 4)
    assert engine.runner.num_reads == 2


def test_a_folder_that_is_not_there_fails_its_requests_alone_and_may_come_later():
    engine = engine_with(1)
    ask(engine, "a", lora("a"))
    ask(engine, "nothing", lora("nothing"))
    outputs = run(engine)
    assert outputs["nothing"].error == "There is no adapter in /adapters/nothing; check the path."
    assert outputs["a"].error is None
    engine.runner.folders["/adapters/nothing"] = 5
    output = answer(engine, "now", lora("nothing"))
    assert first_tokens(output) == expected_with(5, PROMPT, 4)


def test_a_folder_that_cannot_be_read_is_said_in_one_sentence(caplog):
    engine = engine_with(1)
    engine.runner.read_adapter = lambda path: 1 / 0
    error = answer(engine, "a", lora("a")).error
    assert error.startswith("The adapter 'a' cannot be read") and "ZeroDivisionError" in error


def test_what_is_read_again_must_have_the_same_contents():
    engine = engine_with(1, 2, slots=1, host=1)
    assert first_tokens(answer(engine, "1", lora("a"))) == expected_with(1, PROMPT, 4)
    assert first_tokens(answer(engine, "2", lora("b"))) == expected_with(2, PROMPT, 4)
    assert engine.runner.in_host == {fingerprint_of(2)}
    engine.runner.folders[lora("a").lora_path] = 7
    for name in ("3", "4"):  # later ones, too
        assert "has changed since it was loaded" in answer(engine, name, lora("a")).error
    assert fingerprint_of(7) not in engine.runner.in_host
    output = answer(engine, "5", lora("a", number=2))
    assert first_tokens(output) == expected_with(7, PROMPT, 4)
    assert output.num_cached_tokens == 0
    engine.runner.folders[lora("a").lora_path] = 1
    assert first_tokens(answer(engine, "6", lora("a"))) == expected_with(1, PROMPT, 4)


def test_a_folder_that_vanishes_after_its_eviction_fails_those_that_wait_for_it():
    engine = engine_with(1, 2, slots=1, host=1)
    answer(engine, "1", lora("a"))
    answer(engine, "2", lora("b"))
    del engine.runner.folders[lora("a").lora_path]
    ask(engine, "gone", lora("a"))
    ask(engine, "base")
    outputs = run(engine)
    assert "There is no adapter" in outputs["gone"].error
    assert first_tokens(outputs["base"]) == expected_with(0, PROMPT, 4)


def test_a_folder_must_have_the_contents_that_a_request_expects():
    engine = engine_with(1)
    asked = lora("a", fingerprint=fingerprint_of(2))
    assert "has changed" in answer(engine, "1", asked).error
    assert answer(engine, "2", lora("a", fingerprint=fingerprint_of(1))).error is None


def test_one_that_waits_for_a_slot_holds_up_nobody():
    engine = engine_with(1, 2, slots=1)
    ask(engine, "long", lora("a"), max_tokens=40)
    step_until_running(engine, 1)
    ask(engine, "waits", lora("b"))
    ask(engine, "base")
    assert finished_order(engine) == ["base", "long", "waits"]


def test_more_adapters_than_slots_than_host_memory_keeps():
    """64 over 8: every answer is right, and slots change hands no more often than they must."""
    engine = engine_with(slots=8, host=16, max_seqs=16, num_blocks=512)
    engine.runner.folders = {lora(f"n{i}").lora_path: i + 1 for i in range(64)}
    for turn in range(3):
        for i in range(64):
            ask(engine, f"{turn} {i}", lora(f"n{i}"))
    outputs = run(engine)
    for name, output in outputs.items():
        contents = int(name.split()[1]) + 1
        assert first_tokens(output) == expected_with(contents, PROMPT, 4)
    assert len(outputs) == 192
    assert engine.adapters.slots.num_loads < 2 * 64
    assert engine.runner.num_reads < 3 * 64


def test_an_unloaded_adapter_goes_with_its_last_request():
    engine = engine_with(1, 1)
    ask(engine, "a", lora("a"), max_tokens=8)
    step_until_running(engine, 1)
    engine.adapters.forget(lora("a"))
    assert engine.runner.in_host == {fingerprint_of(1)}
    assert first_tokens(run(engine)["a"]) == expected_with(1, PROMPT, 8)
    assert engine.runner.in_host == set() and engine.adapters.slots.adapters == []
    answer(engine, "again", lora("a"))
    answer(engine, "other name", lora("b"))
    engine.adapters.forget(lora("a"))  # the other name still leads to it
    assert engine.runner.in_host == {fingerprint_of(1)}
    engine.adapters.forget(lora("b"))
    assert engine.runner.in_host == set()


def test_contents_that_are_dropped_while_they_are_read_from_elsewhere_are_not_missed():
    """Whether the reading put them there before or after the drop, nobody knows."""
    engine = engine_with(1, 1)
    answer(engine, "1", lora("a"))
    real = engine.runner.read_adapter

    def read(path):
        info = real(path)
        engine.adapters.forget(lora("a"))
        assert engine.runner.in_host == set()
        return AdapterInfo(info.fingerprint, info.rank, info.num_bytes)

    engine.runner.read_adapter = read
    ask(engine, "2", lora("b"))
    engine.adapters.wait(10)
    engine.runner.read_adapter = real
    assert first_tokens(run(engine)["2"]) == expected_with(1, PROMPT, 4)


def test_contents_that_are_dropped_while_three_readings_of_them_are_under_way():
    """What the first and second leave is dropped for sure, and the third may have found it."""
    engine = engine_with(1, 1, 1)
    answer(engine, "1", lora("a"))
    may_end, real = threading.Event(), engine.runner.read_adapter

    def read(path):
        assert path != lora("c").lora_path or may_end.wait(PATIENCE_S)
        return real(path)

    engine.runner.may_read.clear()
    engine.runner.read_adapter = read
    ask(engine, "2", lora("b"))
    ask(engine, "3", lora("c"))
    engine.adapters.forget(lora("a"))
    engine.runner.may_read.set()
    engine.adapters.find(lora("b")).wait(PATIENCE_S)
    step(engine)  # what b's reading left is dropped, and b is read again, behind c
    may_end.set()
    engine.adapters.find(lora("b")).wait(PATIENCE_S)
    outputs = run(engine)
    assert first_tokens(outputs["2"]) == first_tokens(outputs["3"]) == expected_with(1, PROMPT, 4)


def test_forks_and_preempted_sequences_keep_their_adapter():
    engine = engine_with(1, 2, slots=1, num_blocks=12, max_seqs=4)
    engine.add_request("forks", PROMPT, greedy(12, n=3), lora_request=lora("a"))
    ask(engine, "b", lora("b"), max_tokens=12)
    for _ in range(6):
        step(engine)
    engine.scheduler.queues.preempt_youngest()
    outputs = run(engine)
    for sample in outputs["forks"].outputs:
        assert sample.token_ids == expected_with(1, PROMPT, 12)
    assert first_tokens(outputs["b"]) == expected_with(2, PROMPT, 12)


def test_an_engine_without_adapters_says_so():
    engine = make_engine()
    with pytest.raises(RequestError, match="enable_lora"):
        ask(engine, "a", lora("a"))
    options = RequestOptions(lora_request="a")
    with pytest.raises(RequestError, match="LoRARequest, not str"):
        engine.make_request("a", PROMPT, greedy(1), options)


def step_until_running(engine, count):
    while len(engine.scheduler.running) < count:
        step(engine)


def finished_order(engine):
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in step(engine)]
    return order


def test_a_router_is_told_of_the_blocks_of_each_adapter():
    engine = engine_with(1)
    log = engine.publish_events()
    answer(engine, "a", lora("a"))
    of_adapter, of_base = (
        prompt_keys(engine.observed.namespace, PROMPT, "", each) for each in (fingerprint_of(1), "")
    )
    stored = set(log.take().stored)
    assert stored >= set(of_adapter) and not stored & set(of_base)


def test_background_requests_give_way_to_the_first_that_a_slot_lets_begin():
    """One that waits for a slot gains nothing from their places: they keep them."""
    engine = engine_with(1, 2, slots=1, max_seqs=2)
    ask(engine, "long", lora("a"), max_tokens=30)
    step_until_running(engine, 1)  # while its adapter is read, another would come to its end
    ask(engine, "background", max_tokens=30, background=True)
    step_until_running(engine, 2)
    ask(engine, "waits", lora("b"))
    for _ in range(5):
        step(engine)
    assert engine.scheduler.queues.num_preemptions == 0
    ask(engine, "urgent")
    step(engine)
    assert engine.scheduler.queues.num_preemptions == 1
    order = finished_order(engine)
    assert order[0] == "urgent" and order.index("waits") > order.index("long")
