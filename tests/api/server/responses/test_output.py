"""Output items and their events: deltas, joined, are the whole answer, however it was cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.server.answers.call_writer import CallWriter
from quire.api.server.answers.choices import Delta
from quire.api.server.responses.output import OutputWriter
from quire.api.tools.events import CallArguments, CallBegins, Reasoning, Text

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def writer(thoughts_as_summary: bool = False) -> OutputWriter:
    numbers = itertools.count()
    return OutputWriter(lambda: f"call_{next(numbers)}", thoughts_as_summary)


class PlainClient:
    """Builds the output from the events, as the API's document says."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []
        self._text = ""

    def see(self, event: dict[str, Any]) -> None:
        _, kind, what = event["type"].split(".")
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(self.items) == len(self.done)
            assert event["item"]["status"] == "in_progress"
            self.items.append(dict(event["item"]))
            return
        item = self.items[-1]
        assert event["output_index"] == len(self.items) - 1
        if event["type"] == "response.output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            self.done.append(event["item"])
            return
        assert event["item_id"] == item["id"]
        if kind in ("content_part", "reasoning_summary_part"):
            parts = item["summary" if "summary" in kind else "content"]
            if what == "added":
                parts = [*parts, dict(event["part"])]
                item["summary" if "summary" in kind else "content"] = parts
            else:
                assert parts[-1] == event["part"]
        elif kind == "function_call_arguments":
            self._grow(item, "arguments", event, what)
        else:
            part = item["summary" if "summary" in kind else "content"][0]
            self._grow(part, "text", event, what)
            if what == "delta" and "logprobs" in event:
                part["logprobs"] = part["logprobs"] + event["logprobs"]

    def _grow(self, holder: dict[str, Any], name: str, event: dict[str, Any], what: str) -> None:
        if what == "delta":
            assert event["delta"]
            holder[name] += event["delta"]
        else:
            assert holder[name] == event[name]


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without ids, which are new each time."""
    return [{**item, "id": None} for item in items]


WORDS = ["Well. ", "a < b", "\n", "<", "</tool_call>", "é😀", '{"a": 1}', "name", " "]
PIECES = {
    "hermes": ['<tool_call>{"name": "f", "arguments": {"a": "<"}}</tool_call>', "<tool_call>"],
    "llama3": ['<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ";", "<|python_tag|>"],
    "mistral": ['[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[TOOL_CALLS]", "[TOOL"],
    "think": ["<think>", "</think>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
    "harmony": [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        '<|channel|>commentary to=functions.f <|message|>{"a": 1}<|call|><|start|>assistant',
        "<|channel|>final<|message|>",
        "<|end|>",
    ],
}


def reader(name: str, only_one: bool, may_call: bool) -> CallWriter:
    """Of one answer, as this format has it."""
    is_tagged = name == "think"
    read = AnswerFormat.choose("", "hermes" if is_tagged else name, "think" if is_tagged else "off")
    parser = read.parser(may_call=may_call, only_one=only_one)
    return CallWriter(parser, read.calls, may_call=may_call)


def delta(text: str, is_last: bool, is_cut: bool) -> Delta:
    reason = ("length" if is_cut else "stop") if is_last else None
    return Delta(0, 0, is_first=False, text=text, token_ids=[], finish_reason=reason)


@given(data=st.data(), name=st.sampled_from(sorted(PIECES)))
def test_joined_deltas_are_the_whole_answer(data: st.DataObject, name: str) -> None:
    pieces = data.draw(st.lists(st.sampled_from([*WORDS, *PIECES[name]]), max_size=8))
    text = data.draw(st.sampled_from(["", *PIECES[name]])) + "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    may_call, only_one, is_cut, as_summary = (data.draw(st.booleans()) for _ in range(4))
    status = "incomplete" if is_cut else "completed"

    whole = writer(as_summary)
    whole.push(reader(name, only_one, may_call).events(delta(text, True, is_cut)))
    whole.end(status)

    streamed, client = writer(as_summary), PlainClient()
    read = reader(name, only_one, may_call)
    for begin, end in itertools.pairwise(cuts):
        for event in streamed.push(read.events(delta(text[begin:end], False, is_cut))):
            client.see(event)
    told = streamed.push(read.events(delta("", True, is_cut))) + streamed.end(status)
    for event in told:
        client.see(event)
    assert plain(streamed.items) == plain(whole.items)
    assert client.items == client.done == streamed.items
    assert all(item["status"] == "completed" for item in streamed.items[:-1])


@pytest.mark.parametrize("as_summary", [False, True])
def test_items_and_events_are_openais(as_summary: bool) -> None:
    found = writer(as_summary)
    said = [
        Reasoning("Hm"),
        Reasoning("."),
        Text("I look."),
        CallBegins(0, "f"),
        CallArguments(0, "{}"),
        CallBegins(1, "g"),
        Text("Done."),
    ]
    events = found.push(said) + found.end("completed")
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})
    kinds = [ITEM.validate_python(item).type for item in found.items]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    thoughts = found.items[0]["summary" if as_summary else "content"]
    assert [part["text"] for part in thoughts] == ["Hm."]
    assert [found.items[i]["call_id"] for i in (2, 3)] == ["call_0", "call_1"]
    assert found.items[3]["arguments"] == ""


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    found = writer()
    events = found.end("completed")
    assert [item["content"][0]["text"] for item in found.items] == [""]
    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    cut = writer()
    assert cut.end("incomplete") == [] and cut.items == []


def test_logprobs_are_those_of_words() -> None:
    found = writer()
    for event, token in [
        (Reasoning("Hm."), "Hm."),
        (None, "held"),
        (Text("held back"), " back"),
        (None, "<tool"),
        (CallBegins(0, "f"), "_call>"),
        (CallArguments(0, "{}"), "{}"),
        (Text("End."), "End."),
    ]:
        found.push([event] if event else [], [{"token": token}])
    found.end("completed")
    tokens = [
        [entry["token"] for entry in item["content"][0]["logprobs"]]
        for item in found.items
        if item["type"] == "message"
    ]
    assert tokens == [["held", " back"], ["End."]]
