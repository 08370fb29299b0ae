"""`/v1/batches`: a file of requests, answered behind all others."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from quire.api.server.batch.records import BatchRecord, new_batch_id, page
from quire.api.server.errors import bad_request
from quire.api.server.routes.files import PURPOSE
from quire.api.server.schema.batches import CreateBatch, window_seconds
from quire.api.server.state import Caller, State

router = APIRouter()


@router.post("/v1/batches")
async def create(body: CreateBatch, state: State, caller: Caller) -> dict[str, Any]:
    """Begin to answer the lines of an uploaded file."""
    batches = state.batches
    if body.endpoint not in batches.endpoints:
        says = f"endpoint: it must be one of {', '.join(batches.endpoints)}."
        raise bad_request(says, param="endpoint")
    if batches.files(caller).file(body.input_file_id).purpose != PURPOSE:
        says = f"input_file_id: it must be a file with the purpose {PURPOSE!r}."
        raise bad_request(says, param="input_file_id")
    record = BatchRecord(
        new_batch_id(),
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        time.time() + (window_seconds(body.completion_window) or 0),
        body.metadata,
    )
    batches.create(caller, record)
    return record.shown()


@router.get("/v1/batches")
async def listed(
    state: State,
    caller: Caller,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """The caller's batches, the newest first."""
    return page(list(state.batches.files(caller).batches.values()), after, limit)


@router.get("/v1/batches/{batch_id}")
async def retrieve(batch_id: str, state: State, caller: Caller) -> dict[str, Any]:
    """How far a batch is, and the files of its results once it has ended."""
    return state.batches.files(caller).batch(batch_id).shown()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, state: State, caller: Caller) -> dict[str, Any]:
    """End a batch; what has been answered is kept."""
    return state.batches.cancel(caller, batch_id).shown()
