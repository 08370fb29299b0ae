"""`/v1/responses`: make a response, and read, cancel or delete one that is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from quire.api.server.errors import bad_request
from quire.api.server.http.disconnects import EventStream, while_connected
from quire.api.server.http.json_answers import JsonAnswer
from quire.api.server.responses import background
from quire.api.server.responses.request import ReadRequest
from quire.api.server.responses.run import stream, whole
from quire.api.server.schema.responses import ResponsesRequest
from quire.api.server.state import Caller, State

MOST_LISTED = 100

router = APIRouter()


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def create(
    request: Request, body: ResponsesRequest, state: State, caller: Caller
) -> Response:
    """The model's response to some input; as a stream of events with `stream`."""
    read = ReadRequest.read(state, caller, body)
    run = await read.run()
    if body.background:
        state.admission.check(1, run.num_prompt_tokens)
        record = read.record(run.id)
        background.start(run, record, state.responses.of(caller))
        if record.log is None:
            return JsonAnswer(record.as_dict())
        return await EventStream.begin(request, record.log.after(-1))
    # A batch of thousands would push the tenant's conversations out of the store.
    is_kept = body.is_stored and not (caller.in_background and body.store is None)
    run.keep = read.keep if is_kept else None
    if body.stream:
        return await EventStream.begin(request, stream(run))
    return JsonAnswer(await while_connected(request.receive, whole(run)))


@router.post("/v1/responses/input_tokens")
@router.post("/responses/input_tokens", include_in_schema=False)
async def input_tokens(body: ResponsesRequest, state: State, caller: Caller) -> dict[str, Any]:
    """How many tokens the model would be given."""
    read = ReadRequest.read(state, caller, body)
    prompt = await read.prompt(body.params(), body.options(caller, "", 0))
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


@router.get("/v1/responses/{response_id}")
@router.get("/responses/{response_id}", include_in_schema=False)
async def retrieve(
    request: Request,
    response_id: str,
    state: State,
    caller: Caller,
    stream: bool = False,
    starting_after: int = -1,
) -> Response:
    """A stored response; with `stream`, its events from the beginning or behind one of them."""
    record = state.responses.of(caller).get(response_id)
    if not stream:
        return JsonAnswer(record.as_dict())
    if record.log is None:
        raise bad_request("stream needs a response made with background and stream.", "stream")
    return await EventStream.begin(request, record.log.after(max(starting_after, -1)))


@router.delete("/v1/responses/{response_id}")
@router.delete("/responses/{response_id}", include_in_schema=False)
async def delete(response_id: str, state: State, caller: Caller) -> dict[str, Any]:
    """Forget a stored response."""
    state.responses.of(caller).remove(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
@router.post("/responses/{response_id}/cancel", include_in_schema=False)
async def cancel(response_id: str, state: State, caller: Caller) -> Response:
    """Stop a response in the background; one that has ended stays as it is."""
    record = state.responses.of(caller).get(response_id)
    if not record.as_dict()["background"]:
        raise bad_request("Only a response made with background=true can be cancelled.")
    await background.cancel(record)
    return JsonAnswer(record.as_dict())


@router.get("/v1/responses/{response_id}/input_items")
@router.get("/responses/{response_id}/input_items", include_in_schema=False)
async def input_items(
    response_id: str,
    state: State,
    caller: Caller,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The items that the model was given, the newest first unless `order` is asc."""
    items = state.responses.of(caller).get(response_id).input_items()
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after: there is no item {after[:200]!r} in this input.", "after")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > begin + len(page),
    }
