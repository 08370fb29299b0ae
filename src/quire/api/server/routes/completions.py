"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from quire.api.server.answers.answer import answer
from quire.api.server.answers.completion_shape import CompletionShape
from quire.api.server.answers.generation import Generation
from quire.api.server.http.request_ids import answer_id
from quire.api.server.schema.completions import CompletionRequest
from quire.api.server.state import Caller, State

router = APIRouter()


@router.post("/v1/completions")
@router.post("/completions", include_in_schema=False)
async def complete(
    request: Request, body: CompletionRequest, state: State, caller: Caller
) -> Response:
    """Text that follows a prompt, or several; as a stream of events with `stream`."""
    model = state.served_to_write(body.model)
    body.refuse_unsupported()
    state.unknown_fields.note(body.unknown_fields())
    params = body.params()
    special = body.add_special_tokens is not False
    body.check_suffix()
    prompts = [
        body.cut(prompt, state.client.limits.max_model_len, params)
        for prompt in [
            await state.reader.read(each, special, body.suffix) for each in body.prompts()
        ]
    ]
    options = body.options(
        caller, answer_id(CompletionShape.prefix), state.settings.max_queue_seconds
    )
    generation = Generation(
        state,
        prompts,
        params,
        options,
        caller,
        beams=body.beam_search(params),
    )
    shape = CompletionShape(body, state.names, state.client.tokenizer)
    return await answer(
        request,
        generation,
        shape,
        model,
        include_usage=body.include_usage,
    )
