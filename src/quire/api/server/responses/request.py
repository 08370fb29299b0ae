"""From a request's body to a response that can be generated."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import Any

from quire.api.server.answers.generation import Generation
from quire.api.server.answers.prompts import Prompt
from quire.api.server.answers.tool_use import ToolUse
from quire.api.server.errors import ApiError, bad_request
from quire.api.server.http.request_ids import current_id
from quire.api.server.keys import Tenant
from quire.api.server.responses.items import Item, Message, as_messages, read_input
from quire.api.server.responses.response import ResponseObject
from quire.api.server.responses.run import ResponseRun
from quire.api.server.responses.store import StoredResponse, TenantResponses
from quire.api.server.responses.tools import chat_tool_choice, chat_tools, is_left_out
from quire.api.server.responses.truncation import with_last_turns
from quire.api.server.schema.responses import ResponsesRequest
from quire.api.server.state import ServerState
from quire.params import SamplingParams
from quire.request_options import RequestOptions


@dataclass
class ReadRequest:
    """A request with its items read, and the conversation that it continues."""

    state: ServerState
    caller: Tenant
    body: ResponsesRequest
    model: str
    items: list[Item]
    previous: StoredResponse | None
    tool_use: ToolUse

    @classmethod
    def read(cls, state: ServerState, caller: Tenant, body: ResponsesRequest) -> ReadRequest:
        model = state.served_to_write(body.model)
        body.refuse_unsupported()
        _check_numbers(body)
        state.unknown_fields.note(body.unknown_fields())
        state.unknown_fields.note(f"tools: {t['type']}" for t in body.tools or () if is_left_out(t))
        stored = state.responses.of(caller)
        tools, choice = chat_tools(body.tools), chat_tool_choice(body.tool_choice)
        tool_use = state.tool_use(tools, choice, body.parallel_tool_calls)
        tool_use.shows_thoughts = body.shows_thoughts
        return cls(
            state,
            caller,
            body,
            model,
            read_input([] if body.input is None else body.input, stored.item),
            _previous(body.previous_response_id, stored),
            tool_use,
        )

    async def prompt(self, params: SamplingParams, options: RequestOptions) -> Prompt:
        """The conversation in the model's template; PromptTooLong if it does not fit."""
        variables = self.body.template_variables()
        state, limits = self.state, self.state.client.limits

        async def read(messages: list[Message]) -> Prompt:
            shown, given = self.tool_use.conversation(messages, variables)
            prompt = await state.reader.read_chat(shown, True, given)
            limits.check(prompt.token_ids, params, options)
            return prompt

        messages = self._messages()
        if self.body.truncation == "auto":
            return await with_last_turns(messages, read)
        return await read(messages)

    async def run(self) -> ResponseRun:
        """A response to it, not begun yet."""
        body, state = self.body, self.state
        response = ResponseObject(body, self._new_id(), self.model)
        asked = body.params()
        options = body.options(self.caller, response.id, state.settings.max_queue_seconds)
        if body.background:
            options = replace(options, stream=True)  # a client may ask how far it is
        prompt = await self.prompt(asked, options)
        params = self.tool_use.params(asked, prompt)
        generation = Generation(
            state, [prompt], params, options, self.caller, token_by_token=body.wants_logprobs
        )
        return ResponseRun(state.names, body, response, generation, self.tool_use)

    def record(self, response_id: str) -> StoredResponse:
        return StoredResponse.of(response_id, self.items, self.previous)

    def keep(self, response: dict[str, Any]) -> None:
        """Store the response that it has got."""
        record = self.record(response["id"])
        record.end(response)
        self.state.responses.of(self.caller).add(record)

    def _messages(self) -> list[Message]:
        """Instructions are of this request alone: those of the conversation before do not count."""
        items = self.previous.conversation() if self.previous is not None else []
        messages = as_messages([*items, *self.items])
        told = self.body.instructions
        if isinstance(told, str):
            return [{"role": "system", "content": told}, *messages]
        stored = self.state.responses.of(self.caller)
        return as_messages(read_input(told or [], stored.item, "instructions")) + messages

    def _new_id(self) -> str:
        """The request's id behind a prefix, as logs have it. Clients may send an id twice."""
        wanted = f"resp_{current_id()}"
        is_free = wanted not in self.state.responses.of(self.caller) and "/" not in wanted
        return wanted if is_free else f"resp_{uuid.uuid4().hex}"


def _check_numbers(body: ResponsesRequest) -> None:
    """Responses show what was asked for, and JSON has no infinite numbers to show."""
    try:
        json.dumps(body.model_dump(), allow_nan=False)
    except ValueError:
        raise bad_request("A number of the request is too large, or is none; change it.") from None


def _previous(response_id: str | None, stored: TenantResponses) -> StoredResponse | None:
    if response_id is None:
        return None
    if response_id not in stored:
        raise ApiError(
            404,
            f"There is no response {response_id[:200]!r} here to continue; send its items instead.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    found = stored.get(response_id)
    if found.progress is not None:
        raise bad_request(
            "previous_response_id names a response that is still generated; wait for its end.",
            param="previous_response_id",
        )
    return found
