"""Streams without a model: what Anthropic's client makes of the events is the whole message."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import ModuleType

import httpx2
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.server.answers.choices import Delta
from quire.api.server.answers.tool_use import ToolUse
from quire.api.server.errors import ApiError
from quire.api.server.messages import answer
from quire.api.server.messages.blocks import BlockWriter, whole_blocks
from quire.api.tools.events import CallArguments, CallBegins, Reasoning, Text

TOOL = {"type": "function", "function": {"name": "find"}}


@dataclass
class KnownAnswer:
    """In a generation's place: a text that is known, in pieces."""

    pieces: list[str]
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    max_tokens: int = 100
    id: str = "msg_1"
    num_tokens: int = field(default=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    async def deltas(self, quiet_s=None):
        for i, piece in enumerate(self.pieces):
            if quiet_s is not None and i:
                yield []  # nothing came for a while
            self.num_tokens += 1
            yield [Delta(0, 0, i == 0, piece, [1])]
        yield [Delta(0, 0, False, "", [2], [], self.finish_reason, self.stop_reason)]

    def usage(self):
        details = {"cached_tokens": 3}
        return {
            "prompt_tokens": 10,
            "completion_tokens": self.num_tokens,
            "prompt_tokens_details": details,
        }


def writer(tool_format: str, **options):
    tool_use = ToolUse.read(None, AnswerFormat.choose(None, tool_format), [TOOL], None, None)
    return answer.MessageWriter(tool_use, "tiny", **{"shows_thoughts": True, **options})


def streamed(known: KnownAnswer, tool_format: str, **options) -> bytes:
    async def read() -> bytes:
        events = answer._events(known, writer(tool_format, **options))
        return b"".join([part async for part in events])

    return asyncio.run(read())


def whole(known: KnownAnswer, tool_format: str) -> dict:
    return asyncio.run(answer._whole(known, writer(tool_format)))


class Replay:
    """Anthropic's client, to whom every request is answered with the bytes of `stream`."""

    def __init__(self, anthropic: ModuleType) -> None:
        self.stream = b""
        transport = httpx2.MockTransport(self._respond)
        self._client = anthropic.Anthropic(
            api_key="none",
            max_retries=0,
            http_client=anthropic.DefaultHttpxClient(transport=transport, verify=False),
        )

    def _respond(self, request):
        kind = {"Content-Type": "text/event-stream"}
        return httpx2.Response(200, headers=kind, content=self.stream)

    def message(self, stream: bytes) -> dict:
        self.stream = stream
        asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        with self._client.messages.stream(**asked) as events:
            return events.get_final_message().to_dict()


@pytest.fixture(scope="module")
def replay(anthropic: ModuleType) -> Replay:
    return Replay(anthropic)


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20)
JSON = st.dictionaries(WORDS, WORDS | st.integers() | st.lists(WORDS, max_size=2), max_size=3)


def hermes_call(arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'find', 'arguments': arguments})}\n</tool_call>"


def harmony_message(kind: str, text: str) -> str:
    return f"<|channel|>{kind}<|message|>{text}<|end|><|start|>assistant"


ANSWERS = {
    "hermes": st.lists(WORDS | JSON.map(hermes_call), max_size=4),
    "harmony": st.lists(
        st.builds(harmony_message, st.sampled_from(["analysis", "final"]), WORDS)
        | JSON.map(
            lambda given: harmony_message("commentary to=functions.find", json.dumps(given))
        ),
        max_size=4,
    ),
}


@pytest.mark.parametrize("tool_format", ANSWERS)
@given(data=st.data())
@settings(max_examples=examples(120), deadline=None)
def test_the_client_joins_a_stream_to_the_whole_message(replay, tool_format, data):
    text = "".join(data.draw(ANSWERS[tool_format]))
    reason, stop = data.draw(
        st.sampled_from([("stop", 2), ("stop", "###"), ("length", None), ("stop", None)])
    )
    if reason == "length" or stop == "###":
        text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = whole(KnownAnswer(pieces, reason, stop), tool_format)
    found = replay.message(streamed(KnownAnswer(pieces, reason, stop), tool_format))
    for block in (*expected["content"], *found["content"]):
        block.pop("id", None)  # each answer has ids of its own
        block.pop("parsed_output", None)
    assert {name: found[name] for name in expected} == expected


def kinds(stream: bytes) -> list[str]:
    return [line[7:] for line in stream.decode().splitlines() if line.startswith("event: ")]


def test_the_order_of_events():
    call = hermes_call({"a": 1})
    sent = kinds(streamed(KnownAnswer([f"Hello. {call}"]), "hermes"))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    start, *rest = sent
    assert start == "message_start" and rest.pop(1) == "ping"
    assert rest == [*block, *block, "message_delta", "message_stop"]
    assert kinds(streamed(KnownAnswer([""]), "hermes")) == [
        *("message_start", "ping", "message_delta", "message_stop")
    ]


def test_while_nothing_comes_there_are_pings():
    sent = kinds(streamed(KnownAnswer(["a", "b", "c"]), "hermes"))
    assert sent.count("ping") == 3  # at the beginning, and two that the answer waited for


def test_why_an_answer_ended():
    def reason(**known):
        found = whole(KnownAnswer(known.pop("pieces", ["Hi"]), **known), "hermes")
        return found["stop_reason"], found["stop_sequence"]

    call = [hermes_call({})]
    assert reason() == ("end_turn", None)
    assert reason(stop_reason="###") == ("stop_sequence", "###")
    assert reason(finish_reason="length", max_tokens=1) == ("max_tokens", None)
    assert reason(finish_reason="length") == ("model_context_window_exceeded", None)
    assert reason(pieces=call) == ("tool_use", None)
    assert reason(pieces=call, finish_reason="length", max_tokens=1) == ("max_tokens", None)


def test_usage_counts_what_was_cached_apart():
    assert whole(KnownAnswer(["Hi"]), "hermes")["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 1,
    }


def test_thoughts_are_signed_and_may_be_left_out():
    def blocks(**options):
        written = BlockWriter(lambda: "toolu_1", **options)
        return whole_blocks(written.push([Reasoning("I "), Reasoning("see."), Text("Yes.")]))

    [shown, text], [hidden, _] = blocks(), blocks(shows_thoughts=False)
    assert shown["thinking"] == "I see." and text == {"type": "text", "text": "Yes."}
    assert hidden["thinking"] == "" and hidden["signature"] == shown["signature"] != ""


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (["{}"], {}),
        (['{"a": 1, "b": "half'], {"a": 1}),
        ([], {}),
        (["{'a': 1}"], {"INVALID_JSON": "{'a': 1}"}),
        (["[1]"], {"INVALID_JSON": "[1]"}),
    ],
)
def test_arguments_of_calls(arguments, read):
    written = BlockWriter(lambda: "toolu_1")
    events = written.push([CallBegins(0, "find"), *(CallArguments(0, each) for each in arguments)])
    [block] = whole_blocks(events + written.close())
    assert block == {"type": "tool_use", "id": "toolu_1", "name": "find", "input": read}


def test_a_stream_that_fails_ends_with_an_error(replay, anthropic):
    begun = streamed(KnownAnswer(["Hi"]), "hermes").partition(b"event: content_block_stop")[0]
    with pytest.raises(anthropic.APIStatusError) as caught:
        replay.message(begun + answer._stream_error(ApiError(429, "The server is busy.")))
    assert caught.value.type == "overloaded_error"
    assert caught.value.api_message == "The server is busy."
