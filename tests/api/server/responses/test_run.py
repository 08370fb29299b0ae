"""A response that fails or is cancelled while it is generated; the engine is played by a list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.responses import Response

from quire.api.server.answers.choices import Delta
from quire.api.server.answers.logprobs import TokenNames
from quire.api.server.responses import background
from quire.api.server.responses.response import ResponseObject
from quire.api.server.responses.run import ResponseRun, stream, whole
from quire.api.server.responses.store import StoredResponse, TenantResponses
from quire.api.server.schema.responses import ResponsesRequest
from quire.api.tools.events import Text
from quire.api.tools.formats import FORMATS
from quire.engine.process.request_handle import RequestFailed


class Played:
    """A generation that says these texts, and then fails or never ends."""

    def __init__(self, *texts: str, error: Exception | None = None) -> None:
        self._texts, self._error = texts, error
        self.is_open = False

    def __enter__(self) -> Played:
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def usage(self) -> dict[str, Any]:
        details = {"cached_tokens": 0}
        return {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": details}

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        for text in self._texts:
            yield [Delta(0, 0, is_first=False, text=text, token_ids=[1])]
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


def made(played: Played, **options: Any) -> ResponseRun:
    body = ResponsesRequest(input="Hi", **options)
    reads = SimpleNamespace(
        tool_format=FORMATS["hermes"], events=lambda delta: [Text(delta.text)], reasoning_tokens=0
    )
    generation: Any = played
    tool_use: Any = reads
    response = ResponseObject(body, "resp_1", "tiny")
    return ResponseRun(TokenNames(None), body, response, generation, tool_use)


GONE = RequestFailed("The engine failed.", "engine")


def events_of(sent: list[bytes]) -> list[dict[str, Any]]:
    blocks = b"".join(sent).decode().split("\n\n")[:-1]
    return [json.loads(block.split("data: ", 1)[1]) for block in blocks]


def test_a_failure_behind_the_first_event_is_the_last_event() -> None:
    async def read() -> list[bytes]:
        return [sent async for sent in stream(made(Played("Hel", "lo", error=GONE), stream=True))]

    events = events_of(asyncio.run(read()))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "The engine failed."}
    [message] = last["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Hello")
    Response.model_validate(last["response"])


def test_a_failure_before_it_is_raised() -> None:
    with pytest.raises(RequestFailed):
        asyncio.run(whole(made(Played(error=GONE))))
    with pytest.raises(RequestFailed):
        asyncio.run(anext(stream(made(Played(error=GONE), stream=True))))


@pytest.mark.parametrize("rounds", [0, 5])  # of the loop, so that it is entered or not
def test_cancelled_in_the_background(rounds: int) -> None:
    async def cancel() -> tuple[dict[str, Any], bool, list[bytes]]:
        played, stored = Played("Hello"), TenantResponses(10, 10**6)
        run = made(played, background=True, stream=True)
        record = StoredResponse.of("resp_1", [], None)
        background.start(run, record, stored)
        assert record.as_dict()["status"] == "queued"
        for _ in range(rounds):
            await asyncio.sleep(0)
        await background.cancel(record)
        assert record.log is not None
        sent = [chunk async for chunk in record.log.after(-1)]
        return stored.get("resp_1").as_dict(), played.is_open, sent

    response, is_open, sent = asyncio.run(cancel())
    assert response["status"] == "cancelled" and not is_open
    texts = [item["content"][0]["text"] for item in response["output"]]
    assert texts == (["Hello"] if rounds else [])
    assert (response["usage"] is not None) == bool(rounds)
    events = events_of(sent)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == response
    whole_items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert whole_items == response["output"]
    Response.model_validate(response)


def test_what_was_said_so_far_is_shown() -> None:
    async def look() -> dict[str, Any]:
        stored, record = TenantResponses(10, 10**6), StoredResponse.of("resp_1", [], None)
        background.start(made(Played("Hel", "lo"), background=True), record, stored)
        for _ in range(5):
            await asyncio.sleep(0)
        shown = stored.get("resp_1").as_dict()
        await background.cancel(record)
        return shown

    response = asyncio.run(look())
    [message] = response["output"]
    assert response["status"] == message["status"] == "in_progress"
    assert message["content"][0]["text"] == "Hello"
    Response.model_validate(response)


def test_failed_in_the_background() -> None:
    async def fail() -> dict[str, Any]:
        stored, record = TenantResponses(10, 10**6), StoredResponse.of("resp_1", [], None)
        background.start(made(Played("Hello", error=GONE), background=True), record, stored)
        assert record.task is not None
        await asyncio.wait({record.task})
        return stored.get("resp_1").as_dict()

    response = asyncio.run(fail())
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
