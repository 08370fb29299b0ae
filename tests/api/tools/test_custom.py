"""Custom tools: how they are read, and how calls of them become inputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.tools.custom import CustomCalls, InputReader, as_function_calls
from quire.api.tools.definitions import choose_tools, read_choice, read_tools
from quire.api.tools.events import CallArguments, CallBegins, Event, ParsedMessage, Reasoning, Text
from quire.errors import RequestError
from quire.structured import StructuredOutput

NUMBER = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+|none"}}
SUM = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "1" ("+1")*'}}


def custom(name: str = "run", **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **fields}}


def test_a_model_is_shown_a_function():
    [tool] = read_tools([custom(description="Runs code.")])
    function = tool.given["function"]
    assert tool.given["type"] == "function" and function["description"] == "Runs code."
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert tool.custom is not None and tool.custom.form() is None


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        (NUMBER, StructuredOutput(regex="[0-9]+|none")),
        (SUM, StructuredOutput(grammar='start: "1" ("+1")*')),
        ({"type": "text"}, None),
    ],
)
def test_the_form_of_its_input(asked, form):
    [tool] = read_tools([custom(format=asked)])
    assert tool.custom.form() == form


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "custom"}, "needs a custom with a name"),
        ({"type": "other", "other": {}}, "must be of the form"),
        (custom(""), "needs a name"),
        (custom(description=4), "description"),
        (custom(format={"type": "grammar"}), "needs a format"),
        (custom(format={"type": "grammar", "grammar": {"syntax": "peg"}}), "needs a format"),
        (custom(format="text"), "needs a format"),
        (
            custom(format={"type": "grammar", "grammar": {"syntax": "regex", "definition": ""}}),
            "regex must be",
        ),
    ],
)
def test_what_is_no_custom_tool_is_told(given, says):
    with pytest.raises(RequestError, match=says):
        read_tools([given])


def test_it_is_chosen_by_its_name():
    tools = read_tools([custom(), {"type": "function", "function": {"name": "clock"}}])
    assert read_choice(custom(), tools).name == "run"
    named = {"mode": "required", "tools": [custom()]}
    chosen, choice = choose_tools({"type": "allowed_tools", "allowed_tools": named}, tools)
    assert [tool.name for tool in chosen] == ["run"] and choice.kind == "required"


def test_calls_in_the_history_are_the_models_own():
    call = {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": 'say "é"\n'}}
    [message] = as_function_calls([{"role": "assistant", "tool_calls": [call]}])
    [made] = message["tool_calls"]
    assert made["type"] == "function" and made["id"] == "call_1"
    assert json.loads(made["function"]["arguments"]) == {"input": 'say "é"\n'}
    with pytest.raises(RequestError, match="which are texts"):
        as_function_calls([{"tool_calls": [{"type": "custom", "custom": {"name": "run"}}]}])
    plain = [{"role": "user", "content": "Hi"}, "no message", {"tool_calls": "none"}]
    assert as_function_calls(plain) == plain


@settings(max_examples=examples(300), deadline=None)
@given(st.text(), st.booleans(), st.data())
def test_an_input_is_read_in_any_pieces(text, ascii_only, data):
    written = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader, found, place = InputReader(), "", 0
    while place < len(written):
        end = data.draw(st.integers(place + 1, len(written)))
        found += reader.push(written[place:end])
        place = end
    assert found + reader.flush() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{ "input" : "a\tb', "a\tb"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "cut \\ud83d', "cut "),
        (r'{"input": "\d+ in C:\dir"}', r"\d+ in C:\dir"),
        (
            r'{"input": "no number \uZZ, half \ud83d a pair\ud83d\n\ude00"}',
            "no number \\uZZ, half \ufffd a pair\ufffd\n\ufffd",
        ),
        ('{"code": "print(1)"}', "print(1)"),
        ('{"code": "a", "other": "b"}', '{"code": "a", "other": "b"}'),
        ('"plain"', "plain"),
        ("no JSON", "no JSON"),
        ("", ""),
    ],
)
def test_arguments_of_another_form_are_what_may_be_meant(arguments, text):
    reader = InputReader()
    assert "".join([reader.push(each) for each in arguments]) + reader.flush() == text


@settings(max_examples=examples(300), deadline=None)
@given(st.text('\\\\\\ud8cCe0"nx', max_size=30), st.data())
def test_whatever_is_written_is_read_and_can_be_sent(text, data):
    """A model may write text that is not JSON; the reader finds the same in pieces as in one."""
    written = '{"input": "' + text
    cut = data.draw(st.integers(0, len(written)))
    whole, pieces = InputReader(), InputReader()
    found = whole.push(written)
    assert pieces.push(written[:cut]) + pieces.push(written[cut:]) == found
    found.encode()


def read(calls: CustomCalls, events: list[Event]) -> ParsedMessage:
    """Each event by itself, as a stream brings it."""
    found = [each for event in events for each in calls.read([event], is_last=False)]
    return ParsedMessage.of(found + calls.read([], is_last=True))


def test_calls_of_both_kinds():
    events = [
        Text("Now. "),
        CallBegins(0, "run"),
        CallArguments(0, '{"code": '),
        CallArguments(0, '"a"}'),
        CallBegins(1, "clock"),
        CallArguments(1, '{"input": 1}'),
        CallBegins(2, "run"),
        CallArguments(2, '{"input": "b\\'),
        CallArguments(2, 'n"}'),
    ]
    found = read(CustomCalls(["run"]), events)
    assert [(call.name, call.arguments, call.is_custom) for call in found.calls] == [
        ("run", "a", True),
        ("clock", '{"input": 1}', False),
        ("run", "b\n", True),
    ]
    assert found.text == "Now. "


def test_words_are_the_input_of_a_tool_that_is_demanded():
    calls = CustomCalls(["run"], demanded="run")
    found = read(calls, [Reasoning("Hm."), Text("1+"), Text("1")])
    assert [(call.name, call.arguments) for call in found.calls] == [("run", "1+1")]
    assert calls.has_called and found.reasoning == "Hm." and not found.text
