"""Answers in gpt-oss's channels: thoughts, words and calls, whole and in pieces of any size."""

from __future__ import annotations

import json

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.tools.events import Call, CallArguments, CallBegins, ParsedMessage, Reasoning, Text
from quire.api.tools.formats import choose_format
from quire.api.tools.harmony import LONGEST_HEADER, HarmonyParser
from quire.api.tools.parser import parse

ROME = '{"city": "Rome"}'
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 20 °C. <|return|>"
WEATHER = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{ROME}<|call|>"
)
LONG = "to=" + "x" * LONGEST_HEADER

CASES = [
    # text, thoughts, words, calls
    (THOUGHT + FINAL, "Let me see.", "It is 20 °C. ", []),
    (THOUGHT + WEATHER, "Let me see.", "", [("weather", ROME)]),
    # The recipient may stand before the channel, and the kind of content without its tag.
    (
        " to=functions.weather<|channel|>commentary json<|message|>" + ROME,
        "",
        "",
        [("weather", ROME)],
    ),
    # A preamble is words for the reader.
    (
        "<|channel|>commentary<|message|>I look. <|end|>" + WEATHER,
        "",
        "I look. ",
        [("weather", ROME)],
    ),
    (
        "<|channel|>commentary to=weather<|message|>{}<|call|>" + WEATHER,
        "",
        "",
        [("weather", "{}"), ("weather", ROME)],
    ),
    # Tools that the model was trained with, and that it was not given, are used in its thoughts.
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
    # The end of a message may be missing.
    (
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes<|start|>assistant",
        "Hm.",
        "Yes",
        [],
    ),
    ("<|message|>Yes.", "", "Yes.", []),
    ("<|channel|>final <|message|> a <| b <|end", "", " a <| b <|end", []),
    # What has no header is words, such as JSON that was forced.
    ('{"a": "<|message|>"}', "", '{"a": "<|message|>"}', []),
    ("Hello.", "", "Hello.", []),
    (" ", "", " ", []),
    ("to", "", "to", []),
    (LONG, "", LONG, []),
    (THOUGHT, "Let me see.", "", []),
    (THOUGHT + "<|start|>assistant<|chan", "Let me see.", "", []),
    ("", "", "", []),
]


def read(pieces, is_cut=False):
    parser = HarmonyParser()
    events = [event for piece in pieces for event in parser.push(piece)]
    return ParsedMessage.of([*events, *parser.flush(is_cut)])


@pytest.mark.parametrize(("text", "thoughts", "words", "calls"), CASES)
def test_a_whole_message(text, thoughts, words, calls):
    wanted = ParsedMessage(words, [Call(*each) for each in calls], thoughts)
    assert parse(HarmonyParser(), text) == read(text) == wanted


PIECES = st.sampled_from(
    [
        *'ab {}"<|> \n',
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "assistant",
        "analysis",
        "final",
        "commentary to=functions.f ",
        "<|en",
        "x" * 200,
    ]
)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.one_of(
        st.sampled_from([case[0] for case in CASES]),
        st.lists(PIECES, max_size=14).map("".join),
    ),
    st.booleans(),
    st.data(),
)
def test_pieces_of_any_size_give_the_same(text, is_cut, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, is_cut) == read([text], is_cut)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
ARGUMENTS = st.dictionaries(st.text(max_size=8), st.text(max_size=12) | st.integers(), max_size=3)


@settings(max_examples=examples(300), deadline=None)
@given(WORDS, st.lists(ARGUMENTS, max_size=2), WORDS, st.data())
def test_what_is_written_is_read_wherever_it_is_cut(thoughts, calls, words, data):
    """No part of a tag or of a header is said, and what is said is a beginning of it."""
    text = f"<|channel|>analysis<|message|>{thoughts}<|end|>"
    for arguments in calls:
        text += (
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        )
        text += json.dumps(arguments) + "<|call|>"
    text += f"<|start|>assistant<|channel|>final<|message|>{words}"
    whole = read([text])
    assert (whole.reasoning, whole.text) == (thoughts, words)
    assert [(each.name, json.loads(each.arguments)) for each in whole.calls] == [
        ("f", arguments) for arguments in calls
    ]
    part = read([text[: data.draw(st.integers(0, len(text)))]], is_cut=True)
    assert thoughts.startswith(part.reasoning) and words.startswith(part.text)
    assert len(part.calls) <= len(calls)
    for got, arguments in zip(part.calls, calls, strict=False):
        assert json.dumps(arguments).startswith(got.arguments)


def test_all_comes_as_it_is_written():
    parser = HarmonyParser()
    assert parser.push("<|channel|>analysis<|message|>Let") == [Reasoning("Let")]
    assert parser.push(" me<|e") == [Reasoning(" me")]
    assert parser.push("nd|><|start|>assistant to=functions.f<|channel|>comment") == []
    assert parser.push('ary<|message|>{"a"') == [CallBegins(0, "f"), CallArguments(0, '{"a"')]
    assert parser.push(": 1}<|call|>") == [CallArguments(0, ": 1}")]
    assert parser.flush() == []


def test_words_without_a_header_are_not_held_back():
    parser = HarmonyParser()
    assert parser.push('{"ans') == [Text('{"ans')]
    assert parser.push("wer") == [Text("wer")]


def test_only_one_call_if_that_is_wished():
    message = parse(HarmonyParser(only_one=True), THOUGHT + WEATHER + WEATHER)
    assert message == ParsedMessage("", [Call("weather", ROME)], "Let me see.")


def test_its_template_tells_it():
    assert choose_format("{{ '<|start|>assistant<|channel|>final<|message|>' }}").name == "harmony"


def test_a_header_without_end_is_words():
    """As a model writes it that has lost its way; each piece is read in a bounded time."""
    text = (
        "<|channel|>analysis<|message|>Hm.<|start|>" + "assistant " * 100 + "<|start|><|channel|>"
    )
    parser = HarmonyParser()
    events = [event for at in range(0, len(text), 7) for event in parser.push(text[at : at + 7])]
    events += parser.flush()
    words = "".join(event.text for event in events if isinstance(event, Text))
    assert words.startswith("<|start|>assistant assistant")
    assert words.count("assistant") == 100
