"""One response as it is generated: the events of its stream, and the object at any time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from quire.api.server.answers.choices import Delta
from quire.api.server.answers.generation import Generation
from quire.api.server.answers.logprobs import TokenNames, chat_entries
from quire.api.server.answers.tool_use import ToolUse
from quire.api.server.errors import ApiError, as_api_error
from quire.api.server.http.disconnects import event
from quire.api.server.responses.output import OutputWriter, StreamEvent
from quire.api.server.responses.response import ResponseObject, usage_of
from quire.api.server.responses.tools import namespaces
from quire.api.server.schema.responses import ResponsesRequest

Keep = Callable[[dict[str, Any]], None]


class ResponseRun:
    def __init__(
        self,
        names: TokenNames,
        body: ResponsesRequest,
        response: ResponseObject,
        generation: Generation,
        tool_use: ToolUse,
    ) -> None:
        self.id = response.id
        self.keep: Keep | None = None  # is given the whole response before its last event is sent
        self.is_background = bool(body.background)
        self.is_streamed = bool(body.stream)
        self.status = "queued" if body.background else "in_progress"
        self._names = names
        self._response = response
        self._generation = generation
        self._tool_use = tool_use
        self._num_best = body.top_logprobs or 0
        self._writer = OutputWriter(
            tool_use.tool_format.new_id, body.wants_summary, namespaces(body.tools)
        )
        self._error: ApiError | None = None
        self._usage: dict[str, Any] | None = None
        self._num_events = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._generation.prompts)

    def response(self) -> dict[str, Any]:
        """As far as it has come."""
        return self._response.at(self.status, self._writer.so_far(), self._usage, self._error)

    async def events(self) -> AsyncGenerator[list[StreamEvent], None]:
        """All events of its stream, as they come. What fails is raised, and `fail` ends it then.

        Nothing comes before the first token, so that what fails until then is an ordinary error,
        but in the background, where no client waits for it.
        """
        told = [self._about("created")]
        if self.is_background:
            yield [*told, self._about("queued")]
            told = []
        has_begun = False
        with self._generation as generation:
            async for deltas in generation.deltas():
                if not has_begun:
                    self.status, has_begun = "in_progress", True
                    told.append(self._about("in_progress"))
                told += [each for delta in deltas for each in self._read(delta)]
                if told:
                    yield told
                    told = []
        yield self._ended()

    def fail(self, error: Exception) -> list[StreamEvent]:
        """The last events of a response that has failed."""
        self.status, self._error = "failed", as_api_error(error)
        told = self._numbered(self._writer.end("incomplete"))
        return [*told, self._about("failed")]

    def cancel(self) -> list[StreamEvent]:
        """The last events of a response that was cancelled, perhaps before its first ones.

        OpenAI's clients know no `response.cancelled`: the status tells it from one cut by length.
        """
        told = [] if self._num_events else [self._about("created")]
        if self.status == "in_progress":
            self._usage = self._used()
        self.status = "cancelled"
        told += self._numbered(self._writer.end("incomplete"))
        return [*told, self._about("incomplete")]

    def _read(self, delta: Delta) -> Iterable[StreamEvent]:
        logprobs: list[dict[str, Any]] = []
        if delta.entries:
            count = len(delta.token_ids) - delta.ended_by_token
            ids, entries = delta.token_ids[:count], delta.entries[:count]
            logprobs = chat_entries(self._names, ids, entries, self._num_best)
        told = self._writer.push(self._tool_use.events(delta), logprobs)
        if delta.finish_reason is not None:
            self.status = "incomplete" if delta.finish_reason == "length" else "completed"
        return self._numbered(told)

    def _ended(self) -> list[StreamEvent]:
        told = self._numbered(self._writer.end(self.status))
        self._usage = self._used()
        if self.keep is not None:
            self.keep(self.response())
        return [*told, self._about(self.status)]

    def _used(self) -> dict[str, Any]:
        return usage_of(self._generation.usage(), self._tool_use.reasoning_tokens or 0)

    def _about(self, what: str) -> StreamEvent:
        [numbered] = self._numbered([{"type": f"response.{what}", "response": self.response()}])
        return numbered

    def _numbered(self, events: list[StreamEvent]) -> list[StreamEvent]:
        for each in events:
            each["sequence_number"] = self._num_events
            self._num_events += 1
        return events


def as_bytes(events: Iterable[StreamEvent]) -> list[bytes]:
    return [event(each, each["type"]) for each in events]


async def whole(run: ResponseRun) -> dict[str, Any]:
    async for _ in run.events():
        pass
    return run.response()


async def stream(run: ResponseRun) -> AsyncGenerator[bytes, None]:
    has_begun = False
    try:
        async with aclosing(run.events()) as told:
            async for events in told:
                yield b"".join(as_bytes(events))
                has_begun = True
    except Exception as error:
        if not has_begun:
            raise
        yield b"".join(as_bytes(run.fail(error)))
