"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from quire.api.server.answer import answer
from quire.api.server.chat_shape import ChatShape
from quire.api.server.generation import Generation
from quire.api.server.schema.chat import ChatRequest
from quire.api.server.state import Caller, State

router = APIRouter()


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat(request: Request, body: ChatRequest, state: State, caller: Caller) -> Response:
    """The next message of a conversation; as a stream of events with `stream`."""
    model = state.served(body.model)
    body.refuse_unsupported()
    params = body.params()
    prompt = await state.reader.read_chat(
        body.messages, body.add_generation_prompt, body.template_variables()
    )
    generation = Generation(
        state,
        [prompt],
        params,
        stream=bool(body.stream),
        priority=body.priority or 0,
        namespace=caller.namespace(body.cache_salt or ""),
        tenant=caller.name,
    )
    return await answer(
        request,
        generation,
        ChatShape(body, state.names),
        model,
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )
