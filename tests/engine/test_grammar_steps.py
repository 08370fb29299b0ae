"""Sequences under a grammar, among others, in turn and overlapped, whatever happens to steps."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from fake_model import check_idle, expected, greedy, make_engine, run, step
from patience import PATIENCE_S
from spelling import EOS, TOKENS, compiled, tokenizer, written

from quire.engine.grammar.state import GrammarState
from quire.params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}},
        "b": {"enum": [True, False, None]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = {
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "[a-f]{3,9}"},
    "choice": {"choice": ["abcd", "abce", "q0"]},
    "grammar": {"grammar": 'start: "[" item ("," item)* "]"\nitem: /[0-9]{2}/'},
    "plain": None,
    "open": {"regex": "[a-z]*"},
}
PROMPTS = {name: [i + 1] * (2 + 3 * i) for i, name in enumerate(FORMS)}
LENGTH = 12


def engine_for(**settings):
    """With its grammars compiled, so that all requests begin at the same step each time."""
    engine = make_engine(**{"num_blocks": 64, "tokenizer": tokenizer(), **settings})
    engine.grammars = compiled(filter(None, FORMS.values()))
    return engine


def asked(name, max_tokens=LENGTH, **more):
    form = FORMS[name]
    return greedy(max_tokens, **{"structured": form, "ignore_eos": form is None, **more})


def submit(engine, max_tokens=LENGTH):
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, asked(name, max_tokens))


def right(name, max_tokens=LENGTH):
    form = FORMS[name]
    if form is None:
        return expected(PROMPTS[name], max_tokens)
    return written(PROMPTS[name], max_tokens, form)


def all_right(outputs, max_tokens=LENGTH):
    for name in FORMS:
        assert outputs[name].error is None
        assert outputs[name].outputs[0].token_ids == right(name, max_tokens), name


@pytest.mark.parametrize("settings", [{}, {"budget": 5}, {"max_seqs": 2}, {"num_blocks": 9}])
def test_every_form_beside_the_others(settings):
    engine = engine_for(**settings)
    submit(engine)
    outputs = run(engine)
    all_right(outputs)
    text = outputs["choice"].outputs[0].text
    assert text in FORMS["choice"]["choice"]
    assert outputs["choice"].outputs[0].finish_reason == "stop"


def test_a_long_answer_is_json_by_its_schema():
    engine = engine_for()
    for i in range(8):
        engine.add_request(str(i), [i + 1, 3], asked("schema", 60))
    outputs = run(engine)
    ended = [o.outputs[0] for o in outputs.values() if o.outputs[0].finish_reason == "stop"]
    assert ended
    for each in ended:
        found = json.loads(each.text)
        assert list(found) == ["a", "b"] and all(0 <= item <= 99 for item in found["a"])


@pytest.mark.diagonal
@pytest.mark.parametrize("k", range(1, 14))
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("a kernel")])
@pytest.mark.parametrize("where", ["before_launch", "before_draw", "before_result", "before_copy"])
def test_one_failed_step_changes_no_answer(k, error, where):
    engine = engine_for()
    submit(engine)
    count = 0

    def hook(*_):
        nonlocal count
        count += 1
        if count == k:
            raise error

    setattr(engine.runner, where, hook)
    all_right(run(engine))


@pytest.mark.parametrize("where", ["before_launch", "before_draw", "before_result"])
@pytest.mark.parametrize("k", range(1, 9))
def test_an_interrupt_leaves_nothing_half_done(where, k):
    engine = engine_for()
    submit(engine)
    count = 0

    def hook(*_):
        nonlocal count
        count += 1
        if count == k:
            raise KeyboardInterrupt

    setattr(engine.runner, where, hook)
    with pytest.raises(KeyboardInterrupt):
        while engine.has_unfinished_requests():
            engine.step()
    left = set(engine._requests)
    outputs = run(engine)
    assert set(outputs) == left and "plain" in left
    for name in left:
        assert outputs[name].outputs[0].token_ids == right(name), name


@pytest.mark.parametrize("k", range(1, 20))
def test_an_interrupt_between_a_token_and_its_place_in_the_grammar(k, monkeypatch):
    engine = engine_for()
    submit(engine)
    plain, count = GrammarState.follow, 0

    def follow(state, output_ids):
        nonlocal count
        count += 1
        if count == k:
            state.matcher.consume_tokens(output_ids[state._num_followed :].tolist())
            raise KeyboardInterrupt
        plain(state, output_ids)

    monkeypatch.setattr(GrammarState, "follow", follow)
    with pytest.raises(KeyboardInterrupt):
        while engine.has_unfinished_requests():
            engine.step()
    left = set(engine._requests)
    outputs = run(engine)
    for name in left:
        assert outputs[name].outputs[0].token_ids == right(name), name


def test_preempted_at_every_token():
    engine = engine_for()
    submit(engine)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in step(engine)}
        engine.scheduler.queues.preempt_youngest()
    all_right(outputs)
    check_idle(engine)


def test_preempted_for_want_of_blocks():
    engine = engine_for(num_blocks=12)
    prompts = [[i + 1] * 4 for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, asked("open", 24, ignore_eos=True))
    outputs = run(engine)
    assert engine.scheduler.queues.num_preemptions
    for i, prompt in enumerate(prompts):
        right_ids = written(prompt, 24, FORMS["open"], ignore_eos=True)
        assert outputs[str(i)].outputs[0].token_ids == right_ids


@pytest.mark.parametrize("name", ["schema", "regex", "open"])
def test_samples_each_follow_the_grammar_on_their_own(name):
    engine = engine_for()
    params = SamplingParams(n=5, max_tokens=30, seed=3, structured=FORMS[name])
    engine.add_request("a", [1, 2, 3], params)
    alone = {}
    for sample in run(engine)["a"].outputs:
        alone[sample.index] = sample.token_ids
        if sample.finish_reason == "stop" and name == "regex":
            assert 3 <= len(sample.text) <= 9 and set(sample.text) <= set("abcdef")
        if sample.finish_reason == "stop" and name == "schema":
            assert list(json.loads(sample.text)) == ["a", "b"]
    assert len({tuple(ids) for ids in alone.values()}) > 1


def test_the_best_of_several_are_chosen_as_ever(overlap):
    from quire.runner.sampling.logprobs import Logprobs

    engine = engine_for()
    plain = engine.runner.drawn_by

    def with_logprobs(plan, masks):
        result = plain(plan, masks)
        result.logprobs[:] = [Logprobs(i, -float(i), 1) for i in result.token_ids]
        return result

    engine.runner.drawn_by = with_logprobs
    params = SamplingParams(n=2, best_of=6, max_tokens=30, seed=3, structured=FORMS["regex"])
    engine.add_request("a", [1, 2, 3], params)
    outputs = run(engine)["a"].outputs
    assert len(outputs) == 2 and outputs[0].cumulative_logprob >= outputs[1].cumulative_logprob


@pytest.mark.parametrize("wishes", [{}, {"ignore_eos": True}, {"min_tokens": 4}])
@pytest.mark.parametrize("seed", range(6))
def test_ends_of_text_only_where_form_and_request_allow_them(wishes, seed):
    engine = engine_for()
    prompt = [seed + 1, 7]
    engine.add_request("a", prompt, asked("open", 10, **{"ignore_eos": False, **wishes}))
    out = run(engine)["a"].outputs[0]
    assert out.token_ids == written(prompt, 10, FORMS["open"], **wishes)
    if "ignore_eos" in wishes:
        assert EOS not in out.token_ids and out.finish_reason == "length"
    assert EOS not in out.token_ids[: wishes.get("min_tokens", 0)]


@pytest.mark.parametrize("wishes", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_a_form_that_is_complete_ends_the_output_whatever_else_is_wished(wishes):
    engine = engine_for()
    engine.add_request("a", [5], asked("choice", 10, **{"ignore_eos": False, **wishes}))
    out = run(engine)["a"].outputs[0]
    assert out.text in FORMS["choice"]["choice"] and out.finish_reason == "stop"


def test_an_empty_text_is_a_form_too():
    engine = engine_for()
    engine.add_request("a", [5], greedy(9, structured={"regex": "(x{0})"}, ignore_eos=False))
    engine.add_request("b", [5], greedy(9, structured={"regex": "(x{0})"}, min_tokens=3))
    for out in run(engine).values():
        assert out.outputs[0].finish_reason == "stop" and out.outputs[0].text == ""


def test_stop_strings_and_stop_tokens_count():
    engine = engine_for()
    comma = TOKENS.index(",")
    form = {"grammar": 'start: /[0-9]{2}/ ("," /[0-9]{2}/)*'}
    engine.add_request("text", [5], greedy(30, structured=form, stop=[","]))
    engine.add_request("id", [5], greedy(30, structured=form, stop_token_ids=[comma]))
    other = TOKENS.index("q")  # not in the grammar: allowed where the text may end
    engine.add_request("other", [5], greedy(30, structured=form, stop_token_ids=[other]))
    outputs = {name: o.outputs[0] for name, o in run(engine).items()}
    assert outputs["text"].text == outputs["id"].text
    assert len(outputs["id"].text) == 2 and outputs["id"].token_ids[-1] == comma
    other_text = outputs["other"].text
    assert "q" not in other_text
    if outputs["other"].finish_reason == "stop":
        assert len(other_text) % 3 == 2


def test_streams_show_what_the_whole_text_is():
    engine = engine_for()
    engine.add_request("a", [5], asked("schema", 40, stop=["zzz"]), stream=True)
    texts = []
    while engine.has_unfinished_requests():
        texts += [o.outputs[0].text for o in step(engine)]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert texts[-1] == "".join(TOKENS[i] for i in written([5], 40, FORMS["schema"]) if i)


def test_a_grammar_that_cannot_be_had_ends_its_request_alone():
    engine = engine_for()
    submit(engine)
    engine.add_request("bad", [1], greedy(5, structured={"regex": "[a-"}))
    outputs = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert outputs["bad"].error == (
        "The regex cannot be used (unclosed character class); change it."
    )
    del outputs["bad"]
    all_right(outputs)


def test_a_text_that_the_model_cannot_spell_ends_its_request_alone():
    """It is found out on the way: no token begins with the byte that must come."""
    engine = engine_for()
    submit(engine)
    engine.add_request("bad", [1], greedy(9, structured={"regex": "ab(é|ü)"}))
    outputs = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "tokens cannot spell it" in outputs["bad"].error
    del outputs["bad"]
    all_right(outputs)


def test_an_abort_while_the_grammar_is_compiled():
    engine = make_engine(tokenizer=tokenizer())
    engine.add_request("a", [1], asked("schema"))
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    engine.add_request("b", [1], asked("regex"))
    assert list(run(engine)) == ["b"]


def test_an_abort_ends_the_compiling():
    """And takes nothing from a request that waits for the same form."""
    engine = make_engine(tokenizer=tokenizer())
    hostile = {"json_schema": {"type": "integer", "multipleOf": 99999989}}
    engine.add_request("left", [1], greedy(5, structured=hostile), cache_salt="a")
    left = engine.find_request("left").grammar
    engine.add_request("one", [1], asked("schema"))
    engine.add_request("other", [1], asked("schema"))
    engine.abort_request("left")
    engine.abort_request("one")
    assert not left.is_wanted and engine.num_waiting == 1
    outputs = run(engine)
    assert list(outputs) == ["other"] and outputs["other"].error is None
    left.wait(PATIENCE_S)
    assert left.error == "The request for this form was abandoned."
    engine.close()


def test_what_has_ended_holds_no_grammar():
    engine = engine_for()
    submit(engine)
    requests = [engine.find_request(name) for name in FORMS]
    sequences = [s for request in requests for s in request.sequences]
    all_right(run(engine))
    assert all(request.grammar is None for request in requests)
    assert not any(hasattr(s.grammar, "matcher") for s in sequences if s.grammar)


def test_an_interrupt_while_the_grammar_is_compiled():
    engine = make_engine(tokenizer=tokenizer())
    engine.add_request("plain", PROMPTS["plain"], asked("plain"))
    engine.add_request("regex", PROMPTS["regex"], asked("regex"))
    engine.scheduler.plan = lambda only=None: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    del engine.scheduler.plan
    outputs = run(engine)
    assert outputs["regex"].outputs[0].token_ids == right("regex")


def test_a_mask_that_cannot_be_worked_out_ends_its_request_alone():
    """Its grammar grows beyond all limits in the middle of the text."""
    engine = engine_for()
    submit(engine)
    state_of = None
    while state_of is None:
        step(engine)
        found = [s for s in engine.scheduler.running if s.request.id == "open"]
        state_of = found[0].grammar if found and found[0].num_output else None
    state_of.matcher.consume_token(TOKENS.index("{"))  # an error it never leaves
    outputs = run(engine)
    assert outputs["open"].outputs[0].finish_reason == "error"
    assert "cannot be held to its form" in outputs["open"].error
    for name in set(FORMS) - {"open"}:
        assert outputs[name].outputs[0].token_ids == right(name)


def test_steps_without_a_grammar_draw_when_they_are_launched():
    engine = engine_for()
    engine.add_request("plain", PROMPTS["plain"], asked("plain"))
    run(engine)
    assert not any(plan.is_masked for plan in engine.runner.plans)


def test_the_next_step_is_launched_before_the_last_is_read(overlap):
    """With a grammar too: only its draws wait for what the host has to know."""
    engine = engine_for()
    engine.add_request("a", [5], asked("open", 8, ignore_eos=True))
    events = []
    engine.runner.before_launch = lambda plan: events.append("launch")
    engine.runner.before_draw = lambda masks: events.append("draw")
    engine.runner.before_result = lambda: events.append("read")
    run(engine)
    if overlap:
        assert events[:8] == ["launch", "draw", "launch", "read", "draw", "launch", "read", "draw"]
    else:
        assert events[:6] == ["launch", "draw", "read", "launch", "draw", "read"]


def test_masks_are_plain_words():
    engine = engine_for()
    seen = []
    engine.runner.before_draw = seen.append
    submit(engine)
    run(engine)
    for masks in filter(None, seen):
        assert masks.words.dtype == np.int32 and masks.words.shape == (len(masks.rows), 2)


def test_a_form_may_end_in_a_stop_token_before_the_least_number_of_tokens():
    """It is the form that is complete then, and the token is part of its text."""
    engine = engine_for()
    stop_ids = [TOKENS.index("d"), TOKENS.index("e")]
    params = asked("choice", stop_token_ids=stop_ids, min_tokens=LENGTH - 1)
    engine.add_request("choice", PROMPTS["choice"], params)
    [sample] = run(engine)["choice"].outputs
    assert sample.text in FORMS["choice"]["choice"]
    assert sample.finish_reason == "stop"
