"""How an answer is sent in Anthropic's shape: one message, or the events that make it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response

from quire.api.server.answers.choices import Delta
from quire.api.server.answers.generation import Generation
from quire.api.server.answers.tool_use import ToolUse
from quire.api.server.errors import ApiError
from quire.api.server.http.disconnects import EventStream, event, while_connected
from quire.api.server.http.json_answers import JsonAnswer
from quire.api.server.messages.blocks import BlockWriter, StreamEvent, whole_blocks
from quire.api.server.messages.errors import anthropic_error

PING_S = 10.0  # without an event, so that neither client nor proxy takes the stream for dead
PING: StreamEvent = {"type": "ping"}


class MessageWriter:
    """One answer's message, of whose text the engine brings a part at a time."""

    def __init__(self, tool_use: ToolUse, model: str, *, shows_thoughts: bool) -> None:
        self._tool_use = tool_use
        self._model = model
        self._blocks = BlockWriter(
            lambda: tool_use.tool_format.new_id("toolu"), shows_thoughts=shows_thoughts
        )
        self._last: Delta | None = None

    def push(self, deltas: list[Delta]) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        for delta in deltas:
            events += self._blocks.push(self._tool_use.events(delta))
            self._last = delta
        return events

    def close(self) -> list[StreamEvent]:
        return self._blocks.close()

    def message(self, generation: Generation, **others: Any) -> dict[str, Any]:
        """The message as it begins; `others` are what is known at its end."""
        begun: dict[str, Any] = {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(generation) | {"output_tokens": 0},
        }
        return begun | others

    def ending(self, generation: Generation) -> dict[str, Any]:
        """Why the message ended, by the last delta."""
        last = self._last
        reason, sequence = "end_turn", None
        if last is not None and last.finish_reason == "length":
            is_asked = generation.num_tokens == generation.max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif last is not None and isinstance(last.stop_reason, str):
            reason, sequence = "stop_sequence", last.stop_reason
        elif self._tool_use.has_called(0):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


def usage(generation: Generation) -> dict[str, int]:
    """By Anthropic's definition, `input_tokens` are those that were not read from the cache.

    The cache keeps every prompt by itself, so that no tokens count as written to it.
    """
    counted = generation.usage()
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }


async def answer(request: Request, generation: Generation, writer: MessageWriter) -> Response:
    if generation.options.stream:
        return await EventStream.begin(request, _events(generation, writer), _stream_error)
    return JsonAnswer(await while_connected(request.receive, _whole(generation, writer)))


async def _whole(generation: Generation, writer: MessageWriter) -> dict[str, Any]:
    events: list[StreamEvent] = []
    with generation:
        async for deltas in generation.deltas():
            events += writer.push(deltas)
        content = whole_blocks(events + writer.close())
        ending = writer.ending(generation)
        return writer.message(generation, content=content, **ending, usage=usage(generation))


async def _events(generation: Generation, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
    with generation:
        has_begun = False
        async for deltas in generation.deltas(PING_S):
            if not (deltas or has_begun):
                continue  # the status is sent with the first token
            events = writer.push(deltas) if deltas else [PING]
            if not has_begun:
                has_begun = True
                start = {"type": "message_start", "message": writer.message(generation)}
                events = [start, *events[:1], PING, *events[1:]]
            if events:
                yield _sent(events)
        ending = {"type": "message_delta", "delta": writer.ending(generation)}
        last = [*writer.close(), {**ending, "usage": usage(generation)}, {"type": "message_stop"}]
        yield _sent(last)


def _sent(events: list[StreamEvent]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)


def _stream_error(error: ApiError) -> bytes:
    return event(anthropic_error(error.status, str(error), error.code), "error")
