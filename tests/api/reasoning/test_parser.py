"""Thoughts before words and calls, whole and in pieces of any size."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.reasoning.parser import ThoughtParser
from quire.api.reasoning.tags import TAGS
from quire.api.tools.events import Call, CallBegins, ParsedMessage, Reasoning, Text
from quire.api.tools.formats import FORMATS
from quire.api.tools.parser import AnswerParser, WordsParser, parse

THINK = TAGS["think"]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
CODE = 'Write `print("<think></think>")`.'

CASES = [
    # opened in the prompt, text, thoughts, words
    (False, "<think>\nHm.\n</think>\n\nYes. ", "Hm.", "Yes. "),
    (False, " \n<think>Hm.</think>Yes", "Hm.", "Yes"),
    (True, "\nHm,\n\nwell.\n</think>\n\nYes.", "Hm,\n\nwell.", "Yes."),
    (True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),  # the tag is in the prompt, too
    (True, "1 < 2 </ think> </thin </think>", "1 < 2 </ think> </thin", ""),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (True, "</think>Yes.", "", "Yes."),
    (True, "Hm. Cut", "Hm. Cut", ""),
    (False, "<think>Hm. Cut \n", "Hm. Cut", ""),
    (False, "Yes.", "", "Yes."),
    (False, " Yes. ", "", " Yes. "),
    (False, f"{CODE} ", "", f"{CODE} "),
    (False, f"<think>Hm.</think>\n{CODE}", "Hm.", CODE),
    (False, "a</think>b", "", "a</think>b"),
    (False, "<thinking>Hm.", "", "<thinking>Hm."),
    (False, "<thi", "", "<thi"),
    (True, "<thi", "<thi", ""),
    (False, "", "", ""),
    (True, " \n", "", ""),
]


def parser(is_open: bool, rest: type[AnswerParser] = WordsParser) -> ThoughtParser:
    return ThoughtParser(THINK, rest(), is_open)


def read(made: AnswerParser, pieces, is_cut: bool = False) -> ParsedMessage:
    events = [event for piece in pieces for event in made.push(piece)]
    return ParsedMessage.of([*events, *made.flush(is_cut)])


@pytest.mark.parametrize(("is_open", "text", "thoughts", "words"), CASES)
def test_a_whole_answer(is_open, text, thoughts, words):
    assert parse(parser(is_open), text) == ParsedMessage(words, [], thoughts)


@pytest.mark.parametrize(("is_open", "text", "thoughts", "words"), CASES)
def test_letter_by_letter(is_open, text, thoughts, words):
    assert read(parser(is_open), text) == ParsedMessage(words, [], thoughts)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_calls_stand_behind_thoughts(name):
    """A call within a thought is only thought of; behind it, it is a call."""
    written = {
        "hermes": CALL,
        "llama3": '{"name": "clock", "parameters": {"a": 1}}',
        "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {"a": 1}}]',
    }[name]
    made = parser(True, FORMATS[name].parser)
    message = read(made, f"I write {written}.\n</think>\n\n{written}")
    assert message == ParsedMessage("", [Call("clock", '{"a": 1}')], f"I write {written}.")
    assert made.num_calls == 1


def test_thoughts_come_as_they_are_written():
    made = parser(True)
    assert made.push("Hm, ") == [Reasoning("Hm,")]
    assert made.push("well.\n</th") == [Reasoning(" well.")]
    assert made.push("ink>\n") == []
    assert made.push("\nYes") == [Text("Yes")]
    assert made.push(" ") == [Text(" ")]
    assert made.flush() == []


CUT = [
    (True, "Hm. </thi", "Hm.", ""),
    (False, "<thi", "", ""),
    (False, "  ", "", "  "),
    (False, "<think>Hm.</think>Yes. <tool_c", "Hm.", "Yes."),
    (False, "<think>Hm.</think>\n", "Hm.", ""),
    (True, "Hm. <think", "Hm. <think", ""),
]


@pytest.mark.parametrize(("is_open", "text", "thoughts", "words"), CUT)
def test_what_may_be_a_tag_is_not_said_where_the_text_is_cut(is_open, text, thoughts, words):
    for pieces in ([text], text):
        message = read(parser(is_open, FORMATS["hermes"].parser), pieces, is_cut=True)
        assert message == ParsedMessage(words, [], thoughts)


PIECES = st.sampled_from(
    [*"ab <>/\n`é", "<think>", "</think>", "<th", "ink>", "</", CALL, "<tool_call>", "Hm. "]
)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.booleans(),
    st.sampled_from([WordsParser, *(FORMATS[name].parser for name in ("hermes", "llama3"))]),
    st.lists(PIECES, max_size=14).map("".join),
    st.booleans(),
    st.data(),
)
def test_pieces_of_any_size_give_the_same(is_open, rest, text, is_cut, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(parser(is_open, rest), [text], is_cut)
    assert read(parser(is_open, rest), pieces, is_cut) == whole


TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=examples(200), deadline=None)
@given(TEXTS, TEXTS, st.booleans())
def test_what_is_thought_and_said_is_read(thoughts, words, is_open):
    """Any thoughts and any words, as templates write them."""
    thoughts, words = thoughts.replace("<", "").strip(), words.strip()
    text = f"{'' if is_open else '<think>'}\n{thoughts}\n</think>\n\n{words}"
    assert parse(parser(is_open), text) == ParsedMessage(words, [], thoughts)


def test_no_event_is_of_a_later_kind():
    """First thoughts, then words and calls."""
    made = parser(False, FORMATS["hermes"].parser)
    events = [event for char in f"<think>a</think>b{CALL}" for event in made.push(char)]
    kinds = [type(event) for event in events]
    assert kinds[:3] == [Reasoning, Text, CallBegins]


def test_a_long_thought_costs_no_more_than_its_length():
    made = parser(True)
    for _ in range(20_000):
        made.push("and so on ")
    assert made.push("</think>Yes") == [Text("Yes")]
