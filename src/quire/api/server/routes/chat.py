"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from quire.api.server.answers.answer import answer
from quire.api.server.answers.chat_shape import ChatShape
from quire.api.server.answers.generation import Generation
from quire.api.server.http.request_ids import answer_id
from quire.api.server.schema.chat import ChatRequest
from quire.api.server.state import Caller, State

router = APIRouter()


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat(request: Request, body: ChatRequest, state: State, caller: Caller) -> Response:
    """The next message of a conversation; as a stream of events with `stream`."""
    model = state.served_to_write(body.model)
    body.refuse_unsupported()
    state.unknown_fields.note(body.unknown_fields())
    body.check_ending()
    tool_use = state.tool_use(*body.tool_fields())
    tool_use.calls_functions = body.calls_functions
    tool_use.shows_thoughts = body.shows_thoughts
    tool_use.tells_thoughts_apart = body.separate_reasoning is not False
    asked = body.params()
    messages, variables = tool_use.conversation(body.conversation(), body.template_variables())
    prompt = await state.reader.read_chat(
        messages,
        body.add_generation_prompt is not False,
        variables,
        continue_final=body.continue_final_message,
    )
    prompt = body.cut(prompt, state.client.limits.max_model_len, asked)
    params = tool_use.params(asked, prompt)
    options = body.options(caller, answer_id(ChatShape.prefix), state.settings.max_queue_seconds)
    generation = Generation(
        state,
        [prompt],
        params,
        options,
        caller,
        beams=body.beam_search(params),
    )
    return await answer(
        request,
        generation,
        ChatShape(body, state.names, tool_use if tool_use.reads_answers else None),
        model,
        include_usage=body.include_usage,
    )
