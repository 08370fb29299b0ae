"""Budgets for thinking: where a thought must end, and that it ends there in every kind of step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from effort import effort, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llm import ids, open_tiny, write_config

from quire import SamplingParams
from quire.engine.draws.thought_budget import ThoughtBudget
from quire.engine.grammar.masks import MaskWriter
from quire.errors import RequestError
from quire.thinking import ThoughtMarkers

OPEN, CLOSE = 5, 6
TAGS = ThoughtMarkers((OPEN,), (CLOSE,))
BEGUN = ThoughtMarkers((OPEN,), (CLOSE,), is_open=True)
# A header of two or three tokens opens a thought; one token ends it, and three begin the next.
CHANNELS = ThoughtMarkers((1, 2), (3, 4, 1), comes_first=False)
HEADERS = ThoughtMarkers((1, 2, 8), (3, 4, 1), (1, 7), comes_first=False)


def behind(markers: ThoughtMarkers, budget: int, output: list[int]) -> ThoughtBudget:
    thought = ThoughtBudget(markers, budget)
    thought.follow(np.array(output, dtype=np.int32))
    return thought


@pytest.mark.parametrize(
    ("markers", "output", "forced"),
    [
        (BEGUN, [], None),
        (BEGUN, [9, 9], None),
        (BEGUN, [9, 9, 9], CLOSE),
        (BEGUN, [9, 9, 9, 9], CLOSE),  # a form has not let it end there
        (BEGUN, [9, CLOSE, 9, 9, 9], None),
        (BEGUN, [9, 9, 9, CLOSE], None),
        (TAGS, [OPEN, 9, 9, 9], CLOSE),
        (TAGS, [8, OPEN, 9, 9, 9], CLOSE),
        (TAGS, [8, 8, 8, OPEN, 9, 9, 9], None),  # behind the first words a tag is words
        (CHANNELS, [1, 2, 9, 9, 9], 3),
        (CHANNELS, [1, 2, 9, 9, 9, 3], 4),
        (CHANNELS, [1, 2, 9, 9, 9, 3, 4], 1),
        (CHANNELS, [1, 2, 9, 9, 9, 3, 4, 1], None),
        (CHANNELS, [1, 2, 9, 3, 4, 1, 7, 8, 3, 1, 2, 9, 9], 3),  # one budget for all of them
        (CHANNELS, [1, 2, 9, 1, 2, 9], None),
        (CHANNELS, [1, 2, 9, 1, 2, 9, 9], 3),
        (CHANNELS, [1, 7, 9, 9, 9], None),
        (HEADERS, [1, 2, 8, 9, 9], None),
        (HEADERS, [1, 2, 8, 9, 9, 9], 3),
        (HEADERS, [1, 2, 9, 8, 9, 9, 9], None),  # a call, which has more in its header
        (HEADERS, [1, 1, 2, 8, 9, 9, 9], 3),
        (
            HEADERS,
            [1, 2, 8, 9, 3, 4, 1, 7, 8, 9, 9, 1, 2, 8, 9, 9],
            None,
        ),  # behind the last message
    ],
)
def test_what_must_come_next(markers, output, forced):
    assert behind(markers, 3, output).forced == forced


# What tokens of a model with channels say: 1 and 8 are the tags around a header, 3 ends a message.
SAID = {1: "<|channel|>", 8: "<|message|>", 3: "<|end|>", 4: "<|start|>assistant"}
SAID |= {2: "analysis", 6: "ana", 9: "lysis", 7: "final"}
SAID |= {10: " to=python code", 11: " to=functions.f"}
TOLD = ThoughtMarkers((1, 2, 8), (3, 4, 1), (1, 7), comes_first=False, between=(1, 3, 4))


def told(budget: int, output: list[int]) -> ThoughtBudget:
    thought = ThoughtBudget(TOLD, budget, lambda ids: "".join(SAID.get(each, "x") for each in ids))
    thought.follow(np.array(output, dtype=np.int32))
    return thought


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ([1, 2, 8, 5, 5], None),
        ([1, 2, 8, 5, 5, 5], 3),
        ([1, 6, 9, 8, 5, 5, 5], 3),  # spelled in two tokens
        ([1, 6, 2, 8, 5, 5, 5], None),  # "anaanalysis" is another channel
        ([1, 2, 10, 8, 5, 5, 5], 3),
        ([1, 2, 11, 8, 5, 5, 5], None),  # a call
        ([11, 1, 2, 8, 5, 5, 5], None),
        ([1, 2, 8, 5, 4, 11, 1, 2, 8, 5, 5, 5], None),
        ([1, 2, 8, 5, 5, 3, 4, 1, 6, 9, 8, 5], 3),  # one budget for all of them
        ([1, 2, 8, 5, 5, 5, 3, 4, 1, 6, 9, 8], 3),  # begun all the same: closed at once
        ([1, 2, 8, 5, 5, 5, 3, 4, 1, 7, 8, 5, 1, 2, 8], None),  # behind the last message
        ([5] * 600 + [8, 5, 1, 2, 8, 5, 5, 5], 3),  # words that no header came before
    ],
)
def test_what_a_header_says_counts_however_it_is_spelled(output, forced):
    assert told(3, output).forced == forced


def test_the_usual_spelling_is_barred_when_a_budget_is_used_up():
    assert told(0, [1]).barred == 2
    assert told(0, [3, 4, 1]).barred == 2
    assert told(0, [4]).barred is None
    assert told(1, [1]).barred is None


def test_a_channel_is_not_opened_again():
    assert behind(CHANNELS, 3, [1, 2, 9, 9, 9, 3, 4, 1]).barred == 2
    assert behind(CHANNELS, 0, [1]).barred == 2
    assert behind(CHANNELS, 1, [1]).barred is None
    assert behind(CHANNELS, 0, [1, 7]).barred is None
    assert behind(HEADERS, 0, [1]).barred == 2  # before it looks like a thought
    assert behind(HEADERS, 0, [1, 2]).barred is None
    assert behind(BEGUN, 0, [CLOSE]).barred is None


def test_only_draws_that_may_be_ruled_are_masked():
    """A step is planned while the tokens of the one before it are not known yet."""
    assert behind(BEGUN, 5, [9, 9]).num_free == 3
    assert behind(BEGUN, 2, [9, 9]).num_free == 0
    assert behind(HEADERS, 1, [1, 2, 8, 9, 3, 4, 1, 6, 8]).num_free == 1  # the next may be a 1
    assert behind(HEADERS, 1, [1, 2, 8, 9, 3, 4, 1, 6, 8, 1]).num_free == 0


@pytest.mark.parametrize(
    ("markers", "budget", "output", "drafts", "count"),
    [
        (BEGUN, 5, [9, 9], [9, 9, 9, 9], 2),  # the draw behind a third would have to close it
        (BEGUN, 5, [9, 9], [9, CLOSE, 9, 9], 4),
        (BEGUN, 2, [9, 9], [CLOSE, 9], 0),
        (TAGS, 0, [], [OPEN, CLOSE], 0),
        (TAGS, 0, [], [9, 9, 9], 3),
        (HEADERS, 1, [1, 2, 8, 9, 3, 4], [1], 0),
        (HEADERS, 1, [1, 2, 8, 9, 3, 4, 1], [6, 8], 0),
        (HEADERS, 1, [1, 2, 8, 9, 3, 4, 1, 6], [8, 9, 9], 3),
        (HEADERS, 1, [1, 2, 8, 9, 3, 4, 1, 6], [8, 3, 4, 1, 6], 3),
        (HEADERS, 1, [1, 2, 8, 9, 3, 4, 1, 7], [8, 3, 4, 1, 6], 5),
    ],
)
def test_drafts_go_as_far_as_draws_are_free(markers, budget, output, drafts, count):
    thought = behind(markers, budget, output)
    assert thought.num_free_drafts(np.array(drafts, dtype=np.int32)) == count


tokens = st.lists(st.integers(1, 9), max_size=40)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from([TAGS, BEGUN, CHANNELS, HEADERS]), st.integers(0, 6), tokens, st.data())
def test_in_pieces_as_at_once(markers, budget, output, data):
    """Whatever is taken back on the way."""
    thought, done = ThoughtBudget(markers, budget), 0
    while done < len(output):
        done = data.draw(st.integers(done + 1, len(output)))
        thought.follow(np.array(output[:done], dtype=np.int32))
        if data.draw(st.booleans()):
            thought.invalidate()
            done = data.draw(st.integers(0, done))
    thought.follow(np.array(output, dtype=np.int32))
    whole = behind(markers, budget, output)
    assert (thought.forced, thought.barred) == (whole.forced, whole.barred)
    assert (thought.left, thought.is_over) == (whole.left, whole.is_over)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from([TAGS, BEGUN, CHANNELS]), st.integers(0, 6), tokens)
def test_no_thought_is_longer_than_its_budget(markers, budget, wanted):
    """A model that writes what it likes, as far as it is let: read again from the beginning."""
    output: list[int] = []
    for token_id in wanted:
        thought = behind(markers, budget, output)
        if thought.forced is not None:
            token_id = thought.forced
        elif token_id == thought.barred:
            token_id = 9
        output.append(token_id)
    text = " ".join(map(str, [*markers.opens, *output] if markers.is_open else output)) + " "
    opens = " ".join(map(str, markers.opens)) + " "
    num_thoughts = 0
    parts = text.split(opens)
    if markers.comes_first:
        parts = parts[:2] if len(parts[0].split()) < 3 else parts[:1]
        parts[1:] = [text.split(opens, 1)[1]] if len(parts) > 1 else []
    for part in parts[1:]:
        inside = part.split()
        ends = [i for i, each in enumerate(inside) if int(each) == markers.closes[0]]
        heads = [i for i, each in enumerate(inside) if int(each) == markers.opens[0]]
        heads = [] if markers.comes_first else heads
        num_thoughts += min([*ends, *heads, len(inside)])
    assert num_thoughts <= budget


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from([TAGS, BEGUN, CHANNELS, HEADERS]), st.integers(0, 6), tokens, tokens)
def test_free_is_what_it_does_not_rule(markers, budget, output, ahead):
    """By the slow way: what it says behind each token by itself."""
    thought = behind(markers, budget, output)
    states = [behind(markers, budget, output + ahead[:i]) for i in range(len(ahead) + 1)]
    ruled = [i for i, each in enumerate(states) if (each.forced, each.barred) != (None, None)]
    first = ruled[0] if ruled else len(states)
    assert first >= min(thought.num_free, len(states))
    assert thought.num_free_drafts(np.array(ahead, dtype=np.int32)) == max(first - 1, 0)


@pytest.fixture(scope="module", params=["cpu", "cpu-overlapped"])
def where(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def llms(tmp_path_factory, where):
    """Plain, and with drafts and a pool that is too small for all requests."""
    folder = write_config(tmp_path_factory.mktemp("tiny"))
    plain = open_tiny(folder, where, num_blocks=64)
    drafting = open_tiny(folder, where, num_blocks=24, speculative="ngram", max_num_seqs=4)
    yield plain, drafting
    plain.close()
    drafting.close()


def thoughts(output_ids: list[int]) -> int:
    """How many tokens come before the one that ends a thought."""
    return output_ids.index(CLOSE) if CLOSE in output_ids else len(output_ids)


@pytest.mark.parametrize("budget", [0, 1, 2, 7])
def test_thoughts_end_in_every_step(llms, budget):
    """Several samples, with neighbours that have no budget, which draw as they always do."""
    free = SamplingParams(max_tokens=24, ignore_eos=True, seed=1)
    held = SamplingParams(
        max_tokens=24,
        ignore_eos=True,
        seed=1,
        n=2,
        logit_bias={CLOSE: -100.0},
        thinking_token_budget=budget,
        thought_markers=BEGUN,
    )
    pairs = effort(2, 3)
    prompts = [ids(20, salt=i % 2) for i in range(2 * pairs)]
    found = []
    for llm in llms:
        outputs = llm.generate(prompts, [held, free] * pairs)
        for output in outputs[::2]:
            assert [thoughts(each.token_ids) for each in output.outputs] == [budget] * 2
            assert all(len(each.token_ids) == 24 for each in output.outputs)
        found.append([each.token_ids for output in outputs for each in output.outputs])
        alone = llm.generate(prompts[1], free)[0].outputs[0].token_ids
        assert outputs[1].outputs[0].token_ids == alone
    assert found[0] == found[1]


def test_a_thought_that_ends_by_itself_changes_nothing(llms):
    llm = llms[0]
    usual = {"max_tokens": 30, "ignore_eos": True, "seed": 4, "logit_bias": {CLOSE: 2.0}}
    free = llm.generate(ids(9), SamplingParams(**usual))[0].outputs[0].token_ids
    count = thoughts(free)
    assert count < 30
    for budget in (count, count + 5):
        held = SamplingParams(**usual, thinking_token_budget=budget, thought_markers=BEGUN)
        assert llm.generate(ids(9), held)[0].outputs[0].token_ids == free


def test_a_message_behind_the_last_thought_is_none(llms):
    """The model would write nothing but 2, which opens a thought behind 1."""
    markers = ThoughtMarkers((1, 2), (3, 4, 1), is_open=True, comes_first=False)
    params = SamplingParams(
        max_tokens=8,
        ignore_eos=True,
        seed=1,
        logit_bias={2: 100.0},
        thinking_token_budget=2,
        thought_markers=markers,
    )
    for llm in llms:
        found = llm.generate(ids(9), params)[0].outputs[0].token_ids
        assert found[:5] == [2, 2, 3, 4, 1] and found[5] != 2 and found[6:] == [2, 2]


def test_a_tag_that_also_ends_answers_closes_a_thought_before_min_tokens(llms):
    """It would be ruled out there, with all others that the budget rules out."""
    params = SamplingParams(
        max_tokens=12,
        min_tokens=9,
        seed=1,
        stop_token_ids=[CLOSE],
        thinking_token_budget=3,
        thought_markers=BEGUN,
        logit_bias={CLOSE: -100.0},
    )
    for llm in llms:
        [answer] = llm.generate(ids(9), params)[0].outputs
        assert answer.token_ids.index(CLOSE) == 3 and len(answer.token_ids) > 9


def test_only_draws_that_are_ruled_have_a_mask(llms, monkeypatch):
    """Of a neighbour that has much of its budget left, and behind the thought, there is none."""
    llm, rows = llms[0], []
    writer = llm.engine._masks

    def write(schedule):
        masks = MaskWriter.masks(writer, schedule)
        rows.append(0 if masks is None else len(masks.rows))
        return masks

    monkeypatch.setattr(writer, "masks", write)
    usual = {"max_tokens": 12, "ignore_eos": True, "seed": 1, "logit_bias": {CLOSE: -100.0}}
    params = [
        SamplingParams(**usual, thinking_token_budget=budget, thought_markers=BEGUN)
        for budget in (2, 30)
    ]
    outputs = llm.generate([ids(9), ids(8)], params)
    assert [thoughts(each.outputs[0].token_ids) for each in outputs] == [2, 12]
    assert max(rows) == 1 and sum(rows) == 1


def test_headers_of_several_messages_in_every_step(llms):
    """Few tokens are likely, so that headers come often and drafts are found; whatever the step,
    each token is one that a budget which is followed from the beginning lets come."""
    likely = dict.fromkeys((1, 2, 8, 9), 100.0)
    usual = {"max_tokens": 90, "ignore_eos": True, "n": 3, "logit_bias": likely}
    markers = replace(HEADERS, ends=(1, 9, 9, 9))
    found, num_thinking = [], 0
    for llm in llms:
        params = [
            SamplingParams(**usual, seed=seed, thinking_token_budget=2, thought_markers=markers)
            for seed in range(3)
        ]
        outputs = llm.generate([ids(9, salt=i) for i in range(3)], params)
        found.append([each.token_ids for output in outputs for each in output.outputs])
    assert found[0] == found[1]
    for token_ids in found[0]:
        for i, token_id in enumerate(token_ids):
            thought = behind(markers, 2, token_ids[:i])
            assert thought.forced in (None, token_id) and thought.barred != token_id
        num_thinking += behind(markers, 2, token_ids).left == 0
    assert num_thinking > 1


def test_what_cannot_be_held_is_told(llms):
    llm = llms[0]
    with pytest.raises(RequestError, match="thinking_token_budget needs a chat"):
        llm.generate(ids(4), SamplingParams(thinking_token_budget=4))
    with pytest.raises(RequestError, match="thought_markers names token 199"):
        markers = ThoughtMarkers((199,), (6,))
        llm.generate(ids(4), SamplingParams(thinking_token_budget=4, thought_markers=markers))
    with pytest.raises(RequestError, match="thinking_token_budget must be"):
        SamplingParams(thinking_token_budget=-2)
    with pytest.raises(RequestError, match="thought_markers must be"):
        SamplingParams(thought_markers={"opens": [], "closes": [4]})  # type: ignore[arg-type]
