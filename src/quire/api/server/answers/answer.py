"""How an answer is sent: whole, or as a stream of events; the same for completions and chats."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request, Response

from quire.api.server.answers.choices import Delta
from quire.api.server.answers.generation import Generation
from quire.api.server.http.disconnects import DONE, EventStream, event, while_connected
from quire.api.server.http.json_answers import JsonAnswer


class Shape(Protocol):
    """How completions and chats, OpenAI's two formats, write the same content."""

    whole: str  # the `object` of an answer
    chunk: str  # … and of a stream's events

    def choice(self, delta: Delta, generation: Generation) -> dict[str, Any]:
        """A choice of a whole answer."""
        ...

    def chunks(self, delta: Delta, generation: Generation) -> list[dict[str, Any]]:
        """The same as events of a stream."""
        ...

    def beside_choices(self, generation: Generation) -> dict[str, Any]:
        """What the answer says of the prompt; of a stream, its first event."""
        ...

    def usage_details(self) -> dict[str, Any]:
        """What is known of the tokens beyond their number, when the answer is whole."""
        ...


async def answer(
    request: Request,
    generation: Generation,
    shape: Shape,
    model: str,
    *,
    include_usage: bool,
) -> Response:
    head = {"id": generation.id, "created": int(time.time()), "model": model}
    if generation.options.stream:
        events = _events(generation, shape, head | {"object": shape.chunk}, include_usage)
        return await EventStream.begin(request, events)
    whole = _whole(generation, shape, head | {"object": shape.whole})
    return JsonAnswer(await while_connected(request.receive, whole))


async def _whole(generation: Generation, shape: Shape, head: dict[str, Any]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    with generation:
        async for deltas in generation.deltas():
            choices += (shape.choice(delta, generation) for delta in deltas)
        choices.sort(key=lambda choice: int(choice["index"]))
        beside = shape.beside_choices(generation)
        usage = generation.usage() | shape.usage_details()
        return {**head, "choices": choices, **beside, "usage": usage}


async def _events(
    generation: Generation, shape: Shape, head: dict[str, Any], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """With `include_usage` every event has a usage: null, but for one more event at the end."""
    tail: dict[str, Any] = {"usage": None} if include_usage else {}
    beside = shape.beside_choices(generation)
    with generation:
        async for deltas in generation.deltas():
            parts = [part for delta in deltas for part in shape.chunks(delta, generation)]
            events = []
            for part in parts:
                events.append(event({**head, "choices": [part], **beside, **tail}))
                beside = {}
            if events:
                yield b"".join(events)
        last = b""
        if include_usage:
            usage = generation.usage() | shape.usage_details()
            last = event({**head, "choices": [], "usage": usage})
        yield last + DONE
