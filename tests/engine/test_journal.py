"""The journal tells what happened to a request, within bounds, and costs a token nothing."""

from __future__ import annotations

import random

import pytest
from fake_model import check_idle, greedy, make_engine, run, step
from patience import PATIENCE_S

from quire.beam_params import BeamSearchParams
from quire.engine.observe.introspection import views
from quire.engine.observe.journal import Journal


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlap(request):
    return request.param


def watched(**options):
    engine = make_engine(**options)
    engine.keep_journal()
    return engine


def stories(engine, **options):
    return {story["id"]: story for story in views(engine)["journal"](**options)["requests"]}


def told(story):
    return [event["stage"] for event in story["events"]]


def test_a_request_from_the_queue_to_its_end(overlap):
    engine = watched(overlap=overlap, budget=8)
    engine.add_request("a", list(range(1, 19)), greedy(6))
    run(engine)
    story = stories(engine)["a"]
    assert told(story) == [
        "queued",
        "matched",
        *["prefill"] * 3,
        "first token",
        "decode",
        "finished",
    ]
    times = [event["at"] for event in story["events"]]
    assert times == sorted(times) and story["arrived"] > 1e9
    assert [e["tokens"] for e in story["events"] if e["stage"] == "prefill"] == [8, 8, 2]
    assert story["events"][6]["tokens"] == 5 and story["events"][7]["reason"] == "length"
    assert (story["prompt_tokens"], story["output_tokens"]) == (18, 6)
    assert story["finish_reason"] == "length" and "now" not in story


def test_blocks_are_accounted_for(overlap):
    engine = watched(overlap=overlap)
    prompt = list(range(1, 11))
    engine.add_request("a", prompt, greedy(6))
    run(engine)
    engine.add_request("b", prompt, greedy(2))
    run(engine)
    told = stories(engine)
    for story in told.values():
        events = story["events"]
        taken = sum(e.get("taken", 0) + e.get("shared", 0) for e in events)
        assert taken == sum(e.get("given_back", 0) for e in events) > 0
        assert all(sum(e["pool"]) == 16 for e in events)
        assert events[-1]["pool"][2] == 0
    matched, copied = told["b"]["events"][1:3]  # of the third block it wants one token
    assert matched["stage"] == "matched" and matched["shared"] == 3 and matched["tokens"] == 9
    assert copied["stage"] == "copied" and copied["taken"] == copied["given_back"] == 1
    assert told["b"]["cached_tokens_by_tier"] == {"device": 9}
    assert told["a"]["events"][1]["missed"] == "nothing is cached past token 0"


def test_preempted_and_resumed(overlap):
    engine = watched(num_blocks=8, overlap=overlap, max_seqs=2)
    for name in "ab":
        engine.add_request(name, [ord(name) - 96] * 10, greedy(12))
    run(engine)
    assert engine.scheduler.queues.num_preemptions
    story = next(s for s in stories(engine).values() if "preempted" in told(s))
    stages = told(story)
    at = stages.index("preempted")
    assert stages[at - 1] == "decode" and "resumed" in stages[at:]
    assert story["events"][at]["given_back"] > 0
    assert stages.count("first token") == 1


def test_samples_fork_and_copy(overlap):
    engine = watched(overlap=overlap)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], greedy(6, n=3))
    run(engine)
    story = stories(engine)["a"]
    assert told(story).count("forked") == 2 and told(story).count("copied") == 2
    forks = [e for e in story["events"] if e["stage"] == "forked"]
    assert [(e["sample"], e["shared"]) for e in forks] == [(1, 2), (2, 2)]
    assert told(story).count("finished") == 3 and story["output_tokens"] == 18


def test_beams_fork_and_are_dropped(overlap):
    engine = watched(num_blocks=60, overlap=overlap)
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], params)
    run(engine)
    story = stories(engine)["a"]
    dropped = [e for e in story["events"] if e.get("reason") == "dropped"]
    assert told(story).count("forked") == len(dropped)  # and one beam was there before
    assert (story["finish_reason"], story["output_tokens"]) == ("length", 18)
    assert told(story).count("first token") == 1


def test_loaded_from_a_lower_tier(overlap):
    engine = watched(num_blocks=8, host_slots=16, overlap=overlap)
    first = list(range(1, 18))
    engine.add_request("a", first, greedy(2))
    run(engine)
    engine.scheduler.tiering.store.flush(PATIENCE_S)
    engine.scheduler.cache.clear()
    again = engine.make_request("b", first, greedy(2))
    engine.submit(again)
    run(engine)
    story = stories(engine)["b"]
    assert told(story)[:3] == ["queued", "matched", "loaded"]
    assert story["events"][1]["loading"] == {"host": 16} and story["events"][1]["taken"] == 4
    assert story["events"][2]["tiers"] == {"host": 16}
    stages = [stage for stage, _ in again.stages]
    assert stages == ["queued", "loading", "prefill", "decode", "finished"]


def test_an_abort_gives_back_what_it_held(overlap):
    engine = watched(overlap=overlap)
    engine.add_request("a", [1] * 6, greedy(20))
    for _ in range(4):
        step(engine)
    now = stories(engine)["a"]["now"]
    assert now[0]["status"] == "running" and now[0]["held"] >= 2
    engine.abort_request("a")
    while engine.has_unfinished_requests():
        step(engine)
    last = stories(engine)["a"]["events"][-1]
    assert last["stage"] == "finished" and last["reason"] == "abort" and last["given_back"] >= 2


def test_a_failed_step_is_taken_back(overlap):
    engine = watched(overlap=overlap)
    failures = [RuntimeError("once")]

    def fail(plan):
        if failures:
            raise failures.pop()

    engine.runner.before_launch = fail
    engine.add_request("a", [1] * 6, greedy(3))
    run(engine)
    stages = told(stories(engine)["a"])
    assert stages[:4] == ["queued", "matched", "taken back", "matched"]
    assert stages[-1] == "finished"


def test_only_what_is_new_and_whose(overlap):
    engine = watched(overlap=overlap)
    engine.add_request("a", [1] * 6, greedy(2), cache_salt="one")
    run(engine)
    version = views(engine)["journal"]()["version"]
    engine.add_request("b", [1] * 6, greedy(2), cache_salt="two")
    run(engine)
    assert set(stories(engine, since=version)) == {"b"}
    assert set(stories(engine, tenant="one")) == {"a"}
    assert list(stories(engine)) == ["b", "a"] and len(stories(engine, limit=1)) == 1


def test_that_another_has_asked_the_same_is_not_told():
    engine = watched()
    for tenant in ("one", "two"):
        engine.add_request(tenant, [1, 2] * 6, greedy(2), cache_salt=tenant)
        run(engine)
    told = stories(engine, tenant="two")["two"]
    assert told["miss_reason"] == "nothing is cached past token 0" and "salt" not in str(told)


def test_memory_is_bounded():
    engine = make_engine(budget=4)
    journal = engine.scheduler.watch = Journal(engine.scheduler.cache, 3, 8)
    for number in range(10):
        engine.add_request(str(number), [number + 1] * 40, greedy(2))
        run(engine)
    assert list(journal._stories) == ["7", "8", "9"]
    story = stories(engine)["9"]
    assert len(story["events"]) == 8 and story["omitted"] == 15 - 8
    assert told(story)[:2] == ["queued", "matched"] and told(story)[-1] == "finished"


def test_without_a_journal_only_the_stages_are_kept(overlap):
    engine = make_engine(overlap=overlap)
    request = engine.make_request("a", [1] * 6, greedy(3))
    engine.submit(request)
    run(engine)
    assert [stage for stage, _ in request.stages] == ["queued", "prefill", "decode", "finished"]
    times = [at for _, at in request.stages]
    assert times == sorted(times)
    assert views(engine)["journal"]() == {"version": 0, "requests": []}


@pytest.mark.parametrize("seed", range(6))
def test_any_life_adds_up(seed, overlap):
    """Whatever happens, what a request took and shared it has given back at its end."""
    chance = random.Random(seed)
    engine = watched(
        num_blocks=12, overlap=overlap, host_slots=8 if seed % 2 else None, max_seqs=4, budget=16
    )
    names, failures = [], [RuntimeError("x")] * 3

    def fail(plan):
        if failures and chance.random() < 0.1:
            raise failures.pop()

    engine.runner.before_launch = fail
    for number in range(30):
        name, length = str(number), chance.randint(1, 20)
        names.append(name)
        prompt = [chance.randint(1, 2) for _ in range(length)]
        beams = BeamSearchParams(beam_width=chance.randint(1, 4), max_tokens=chance.randint(1, 6))
        samples = greedy(chance.randint(1, 8), n=chance.randint(1, 3))
        engine.add_request(name, prompt, beams if chance.random() < 0.3 else samples)
        for _ in range(chance.randint(0, 4)):
            step(engine)
        if chance.random() < 0.2:
            engine.abort_request(chance.choice(names))
    run(engine)
    check_idle(engine)
    for story in stories(engine).values():
        events = story["events"]
        if not story["omitted"]:
            taken = sum(e.get("taken", 0) + e.get("shared", 0) for e in events)
            assert taken == sum(e.get("given_back", 0) for e in events)
        assert events[-1]["stage"] == "finished" and story["finish_reason"] is not None
