"""Engines with tiers: what is loaded is right, blocks under way have one owner, all gets on."""

from __future__ import annotations

import random

import pytest
from effort import effort
from fake_model import check_idle, expected, greedy, make_engine, run, step
from patience import PATIENCE_S
from shelf import Shelf

from quire.engine.observe.introspection import engine_stats
from quire.kv.foreground import Foreground
from quire.kv.job_queue import Handle

BLOCK = 4
IMAGE = 4 * BLOCK
GROUPED = pytest.mark.parametrize("windows", [(None,), (None, 6, 6)], indirect=True, ids=str)


def prompt_of(seed, length=24):
    return [random.Random(seed).randrange(1, 50) for _ in range(length)]


def ask(engine, name, prompt, max_tokens=6, **options):
    engine.add_request(name, prompt, greedy(max_tokens), **options)


def answers(engine, prompts, max_tokens=6):
    for i, prompt in enumerate(prompts):
        ask(engine, str(i), prompt, max_tokens)
    outputs = run(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].outputs[0].token_ids == expected(prompt, max_tokens)
    return [outputs[str(i)] for i in range(len(prompts))]


def push_out(engine):
    """Forget what the device has, once the tiers have it too."""
    assert engine.scheduler.tiering.store.flush(PATIENCE_S)
    check_idle(engine)
    engine.scheduler.cache.clear()
    engine.runner.after_step()


@GROUPED
def test_a_prefix_comes_back_from_host_memory(windows):
    engine = make_engine(host_slots=32)
    prompt = prompt_of(1)
    answers(engine, [prompt])
    computed = engine.runner.computed
    push_out(engine)
    [output] = answers(engine, [prompt])
    assert output.num_cached_tokens == 20
    assert output.cached_tokens_by_tier == {"host": 20}
    assert engine.runner.computed - computed == 24 + 5 - 20
    assert engine_stats(engine)["tiers"]["host"]["hit_tokens"] == 20


def test_a_prompt_that_no_tier_has_needs_one_name(monkeypatch):
    """Its first block's: nothing can be found behind that, and a step waits meanwhile."""
    engine = make_engine(host_slots=32, tiers=[Shelf(IMAGE)])
    tiering, named = engine.scheduler.tiering, []
    names_behind = tiering._names_behind

    def count_names(sequence, limit):
        named.append(names_behind(sequence, limit))
        return named[-1]

    monkeypatch.setattr(tiering, "_names_behind", count_names)
    answers(engine, [prompt_of(1)])
    assert not named
    push_out(engine)
    [output] = answers(engine, [prompt_of(1)])
    assert len(named) == 1 and output.cached_tokens_by_tier == {"host": 20}


@pytest.mark.parametrize("tenant", [None, "all of them"])
def test_each_salt_is_a_tenant_unless_it_is_said_whose_it_is(tenant):
    engine = make_engine(host_slots=20, tenant_share=0.5)
    for salt in ("a", "b"):
        for seed in range(3):
            ask(engine, f"{salt}{seed}", prompt_of(seed), cache_salt=salt, tenant=tenant)
            run(engine)
    push_out(engine)
    assert len(engine.scheduler.tiering.store.host) == (20 if tenant is None else 10)


def test_what_is_loaded_from_below_takes_its_tenants_share():
    shelf = Shelf(IMAGE)
    writer = make_engine(host_slots=0, tiers=[shelf])
    prompts = [prompt_of(seed) for seed in range(4)]
    answers(writer, prompts)
    push_out(writer)
    reader = make_engine(host_slots=24, tiers=[shelf], tenant_share=0.5)
    for prompt in prompts:
        [output] = answers(reader, [prompt])
        assert output.cached_tokens_by_tier == {"ssd": 20}
        push_out(reader)
    assert len(reader.scheduler.tiering.store.host) == 12


@GROUPED
@pytest.mark.parametrize("is_local", [True, False], ids=["near", "far"])
def test_a_prefix_comes_back_from_a_lower_tier_to_another_engine(windows, is_local):
    shelf = Shelf(IMAGE, is_local=is_local)
    prompt = prompt_of(1)
    first = make_engine(host_slots=0, tiers=[shelf])
    answers(first, [prompt])
    push_out(first)
    second = make_engine(host_slots=16, tiers=[shelf])
    [output] = answers(second, [prompt])
    assert output.cached_tokens_by_tier == {"ssd": 20}
    push_out(second)
    [output] = answers(second, [prompt])
    assert output.cached_tokens_by_tier == {"host": 20}


def test_the_device_has_the_head_and_host_memory_the_tail():
    engine = make_engine(host_slots=32)
    prompt = prompt_of(1, 32)
    answers(engine, [prompt])
    push_out(engine)
    answers(engine, [prompt[:13]])
    [output] = answers(engine, [prompt])
    assert output.cached_tokens_by_tier == {"device": 12, "host": 16}


@GROUPED
def test_another_salt_finds_nothing(windows):
    engine = make_engine(host_slots=32)
    prompt = prompt_of(1)
    answers(engine, [prompt])
    push_out(engine)
    ask(engine, "other", prompt, cache_salt="tenant")
    assert run(engine)["other"].num_cached_tokens == 0
    push_out(engine)
    ask(engine, "again", prompt, cache_salt="tenant")
    assert run(engine)["again"].num_cached_tokens == 20


def test_preempted_sequences_come_back_without_being_computed_again():
    prompts = [prompt_of(seed, 16) for seed in range(4)]
    engine = make_engine(num_blocks=12, host_slots=64)
    answers(engine, prompts, max_tokens=20)
    assert engine.scheduler.queues.num_preemptions > 0
    assert engine.scheduler.tiering.tokens_by_tier["host"] > 0
    without = make_engine(num_blocks=12)
    answers(without, prompts, max_tokens=20)
    assert engine.runner.computed < without.runner.computed


@GROUPED
def test_others_are_computed_while_one_is_loaded(windows):
    shelf = Shelf(IMAGE)
    slow = prompt_of(1)
    answers(first := make_engine(host_slots=0, tiers=[shelf]), [slow])
    push_out(first)
    engine = make_engine(host_slots=0, tiers=[shelf])
    shelf.read_gate.clear()
    ask(engine, "slow", slow)
    ask(engine, "other", prompt_of(2))
    outputs = {}
    while "other" not in outputs:
        outputs.update((output.request_id, output) for output in step(engine))
    assert "slow" not in outputs
    shelf.read_gate.set()
    outputs.update(run(engine))
    assert outputs["slow"].outputs[0].token_ids == expected(slow, 6)
    assert outputs["slow"].cached_tokens_by_tier == {"ssd": 20}


@GROUPED
def test_samples_that_fork_leave_room_for_those_being_loaded(windows):
    shelf = Shelf(IMAGE)
    slow = prompt_of(1)
    answers(first := make_engine(host_slots=0, tiers=[shelf]), [slow])
    push_out(first)
    engine = make_engine(num_blocks=32, host_slots=0, tiers=[shelf], max_seqs=4)
    shelf.read_gate.clear()
    ask(engine, "slow", slow)
    engine.add_request("many", prompt_of(2), greedy(6, n=4))
    step(engine)
    assert shelf.reading.wait(PATIENCE_S)
    step(engine)
    shelf.read_gate.set()
    assert engine.scheduler.tiering.store.flush(PATIENCE_S)
    outputs = run(engine)  # never more of them at once than max_seqs
    assert [each.token_ids for each in outputs["many"].outputs] == [expected(prompt_of(2), 6)] * 4
    assert outputs["slow"].outputs[0].token_ids == expected(slow, 6)


@GROUPED
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_an_abort_at_any_moment_of_a_load(windows, moment):
    shelf = Shelf(IMAGE)
    prompt = prompt_of(1)
    answers(first := make_engine(host_slots=0, tiers=[shelf]), [prompt])
    push_out(first)
    engine = make_engine(host_slots=4, tiers=[shelf])
    shelf.read_gate.clear()
    ask(engine, "gone", prompt)
    if moment != "before":
        step(engine)
        assert shelf.reading.wait(PATIENCE_S)
    if moment == "after":
        shelf.read_gate.set()
        engine.scheduler.tiering.store.flush(PATIENCE_S)
    assert engine.abort_request("gone") is not None
    check_idle(engine)  # though the tier may still be reading
    others = [prompt_of(2), prompt_of(3)]
    answers(engine, others)
    shelf.read_gate.set()
    engine.scheduler.tiering.store.flush(PATIENCE_S)
    answers(engine, [prompt_of(2), prompt])
    check_idle(engine)


class EndsWhenAskedTwice(Handle):
    """A copy that ends between two questions."""

    def __init__(self):
        super().__init__()
        self._answers = iter([False])

    def done(self):
        return next(self._answers, True)

    def wait(self, timeout=None):
        self._answers = iter(())
        return True


def test_a_put_that_ends_while_it_is_asked_after_frees_its_blocks(monkeypatch):
    engine = make_engine(host_slots=4)
    tiering, puts = engine.scheduler.tiering, []

    def put_names(names, blocks, is_computed):
        puts.append(EndsWhenAskedTwice())
        return puts[-1]

    monkeypatch.setattr(tiering.store, "put_names", put_names)
    answers(engine, [prompt_of(1)])
    assert len(puts) > 1  # each offer asks after the puts before it
    check_idle(engine)


def test_a_withdrawn_load_that_ends_while_it_is_asked_after_frees_its_blocks(monkeypatch):
    shelf, prompt = Shelf(IMAGE), prompt_of(1)
    answers(first := make_engine(host_slots=0, tiers=[shelf]), [prompt])
    push_out(first)
    engine = make_engine(host_slots=4, tiers=[shelf])
    tiering = engine.scheduler.tiering
    withdraw, withdrawn = tiering.store.withdraw, []

    def withdraw_and_wait(load):
        assert withdraw(load).wait(PATIENCE_S)
        withdrawn.append(EndsWhenAskedTwice())
        return withdrawn[-1]

    monkeypatch.setattr(tiering.store, "withdraw", withdraw_and_wait)
    shelf.read_gate.clear()
    ask(engine, "gone", prompt)
    step(engine)
    assert shelf.reading.wait(PATIENCE_S)
    assert engine.abort_request("gone") is not None
    assert withdrawn and tiering.copied_blocks()
    tiering.poll()
    assert tiering.copied_blocks() == []
    shelf.read_gate.set()
    check_idle(engine)


@GROUPED
def test_a_tier_that_breaks_costs_time_and_nothing_else(windows):
    shelf = Shelf(IMAGE)
    prompt = prompt_of(1)
    answers(first := make_engine(host_slots=0, tiers=[shelf]), [prompt])
    push_out(first)
    engine = make_engine(host_slots=4, tiers=[shelf])
    shelf.broken = True
    [output] = answers(engine, [prompt])
    assert output.num_cached_tokens == 0


def test_a_far_tier_that_hangs_delays_by_a_bounded_time(monkeypatch):
    monkeypatch.setattr("quire.kv.store.ASK_DEADLINE_S", 0.1)
    shelf = Shelf(IMAGE, is_local=False)
    shelf.gate.clear()
    engine = make_engine(host_slots=4, tiers=[shelf])
    answers(engine, [prompt_of(1)])
    assert shelf.asked.is_set() and not shelf.answered.is_set()
    shelf.gate.set()


@GROUPED
def test_a_step_that_fails_while_blocks_are_loaded(windows):
    shelf = Shelf(IMAGE)
    prompt = prompt_of(1)
    answers(first := make_engine(host_slots=0, tiers=[shelf]), [prompt])
    push_out(first)
    engine = make_engine(host_slots=4, tiers=[shelf], overlap=True)
    failures = iter([False, True, False, False, True])

    def fail(plan):
        if next(failures, False):
            raise RuntimeError("a bad step")

    engine.runner.before_launch = fail
    answers(engine, [prompt_of(2), prompt, prompt_of(3)])


@GROUPED
def test_prefixes_that_are_slower_to_load_than_to_compute_are_computed(windows):
    shelf = Shelf(IMAGE)
    prompt = prompt_of(1)
    answers(first := make_engine(host_slots=0, tiers=[shelf]), [prompt])
    push_out(first)
    engine = make_engine(host_slots=4, tiers=[shelf])
    rates = engine.scheduler.tiering.store.rates
    rates.observe("ssd", 1, 1.0)  # a block a second …
    rates.observe("prefill", 1000, 1.0)  # … or 250
    [output] = answers(engine, [prompt])
    assert output.num_cached_tokens == 0
    assert output.miss_reason == "loading from ssd would be slower than computing"


def test_of_a_tier_that_nobody_knows_a_little_is_tried():
    shelf = Shelf(IMAGE)
    prompt = prompt_of(1, 100)
    answers(first := make_engine(host_slots=0, tiers=[shelf], num_blocks=64), [prompt])
    push_out(first)
    engine = make_engine(host_slots=4, tiers=[shelf], num_blocks=64)
    rates = engine.scheduler.tiering.store.rates
    rates.observe("prefill", 1000, 1.0)
    [output] = answers(engine, [prompt])
    assert output.num_cached_tokens == 16 * BLOCK  # of 24
    push_out(engine)
    for _ in range(20):  # till what a busy machine took for the first load does not count
        rates.observe("prefill", 1000, 1.0)
        rates.observe("ssd", 100_000, 1.0)
    [output] = answers(engine, [prompt])
    assert output.num_cached_tokens == 24 * BLOCK


def test_waiting_requests_are_prefetched():
    shelf = Shelf(IMAGE)
    prompts = [prompt_of(seed) for seed in range(3)]
    answers(first := make_engine(host_slots=0, tiers=[shelf], num_blocks=32), prompts)
    push_out(first)
    engine = make_engine(host_slots=32, tiers=[shelf], max_seqs=1)
    outputs = answers(engine, prompts)
    assert outputs[0].cached_tokens_by_tier == {"ssd": 20}
    assert engine_stats(engine)["tiers"]["host"]["used"] >= 15


@GROUPED
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_life_with_small_tiers(windows, seed):
    """Everything at once: full pools, aborts, preemption, a tier that loses, steps that fail."""
    dice = random.Random(seed)
    shelf = Shelf(IMAGE, is_local=bool(seed % 2))
    engine = make_engine(num_blocks=14, host_slots=10, tiers=[shelf], max_seqs=4)
    prompts = [prompt_of(i, dice.randrange(3, 30)) for i in range(6)]
    prompts += [prompts[i][: 8 + i] + prompt_of(10 + i, 8) for i in range(4)]
    wanted, number = {}, 0

    def fail_now_and_then(*_):
        if dice.random() < 0.03:
            raise dice.choice([RuntimeError, MemoryError])("now and then")

    engine.runner.before_launch = fail_now_and_then
    engine.runner.before_result = fail_now_and_then
    for _ in range(effort(200, 400)):
        if len(wanted) < 6 and dice.random() < 0.4:
            prompt = dice.choice(prompts)
            number += 1
            wanted[str(number)] = prompt
            ask(engine, str(number), prompt, dice.randrange(1, 12))
        if wanted and dice.random() < 0.05:
            gone = dice.choice(list(wanted))
            engine.abort_request(gone)
            del wanted[gone]
        if shelf.images and dice.random() < 0.1:
            shelf.images.pop(dice.choice(list(shelf.images)), None)
        for output in step(engine):
            prompt = wanted.pop(output.request_id)
            got = output.outputs[0].token_ids
            assert (
                output.error is None
                or "failed (RuntimeError)" in output.error
                or "memory" in output.error
            )
            assert got == expected(prompt, len(got))
    run(engine)
    engine.close()


def test_copies_give_way_until_a_step_is_launched(monkeypatch, overlap):
    """Their threads would take time from the launch, which the device waits for."""
    moments = []
    for name in ("begin", "end"):
        monkeypatch.setattr(Foreground, name, lambda self, name=name: moments.append(name))
    engine = make_engine(host_slots=32)
    engine.runner.before_launch = lambda plan: moments.append("launch")
    engine.runner.before_result = lambda: moments.append("result")
    use = engine.scheduler.tiering.store.use
    monkeypatch.setattr(
        engine.scheduler.tiering.store, "use", lambda *keys: (moments.append("use"), use(*keys))
    )
    answers(engine, [prompt_of(1)])
    assert moments[-1] == "begin"  # nor do they take time from who gets the answer
    assert moments.index("use") > moments.index("launch")
    state = ""
    for moment in moments:
        assert moment != "launch" or state == "begin"
        assert moment != "result" or state == "end"
        state = moment if moment in ("begin", "end") else state


def test_copies_wait_for_no_step_that_its_launch_computes(monkeypatch, overlap):
    engine = make_engine(host_slots=32)
    begun = []
    monkeypatch.setattr(
        engine.scheduler.tiering.store.foreground, "begin", lambda: begun.append(True)
    )
    answers(engine, [prompt_of(1)])
    assert bool(begun) == overlap
