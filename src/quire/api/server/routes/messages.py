"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, Anthropic's."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from quire.api.server.answers.generation import Generation
from quire.api.server.answers.prompts import Prompt
from quire.api.server.answers.tool_use import ToolUse
from quire.api.server.http.request_ids import current_id
from quire.api.server.messages.answer import MessageWriter, answer
from quire.api.server.schema.messages import CountTokensRequest, MessagesRequest
from quire.api.server.state import Caller, ServerState, State

router = APIRouter()


@router.post("/v1/messages")
@router.post("/messages", include_in_schema=False)
async def messages(
    request: Request, body: MessagesRequest, state: State, caller: Caller
) -> Response:
    """The next message of a conversation in Anthropic's shape; as events with `stream`."""
    model, tool_use = _begin(body, state)
    asked = body.params()
    prompt = await _prompt(body, state, tool_use)
    params = tool_use.params(asked, prompt, budget_is_wish=True)
    options = body.options(caller, f"msg_{current_id()}", state.settings.max_queue_seconds)
    generation = Generation(state, [prompt], params, options, caller)
    writer = MessageWriter(tool_use, model, shows_thoughts=body.shows_thoughts)
    return await answer(request, generation, writer)


@router.post("/v1/messages/count_tokens")
@router.post("/messages/count_tokens", include_in_schema=False)
async def count_tokens(body: CountTokensRequest, state: State, caller: Caller) -> dict[str, int]:
    """How many tokens the same conversation is as a prompt."""
    _, tool_use = _begin(body, state)
    prompt = await _prompt(body, state, tool_use)
    return {"input_tokens": len(prompt.token_ids)}


def _begin(body: CountTokensRequest, state: ServerState) -> tuple[str, ToolUse]:
    model = state.served_to_write(body.model)
    body.refuse_unsupported()
    state.unknown_fields.note(body.unknown_fields())
    return model, state.tool_use(*body.functions())


async def _prompt(body: CountTokensRequest, state: ServerState, tool_use: ToolUse) -> Prompt:
    turns, variables = tool_use.conversation(body.conversation(), body.template_variables())
    return await state.reader.read_chat(
        turns, variables=variables, continue_final=body.is_continued
    )
