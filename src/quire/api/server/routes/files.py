"""`/v1/files`: what a batch reads, and the results that it has written."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from quire.api.server.batch.records import FileRecord, page
from quire.api.server.batch.store import TenantFiles, shown_name
from quire.api.server.errors import ApiError, ClientLeft, bad_request
from quire.api.server.state import Caller, State

router = APIRouter()

UPLOADS = "/v1/files"
PURPOSE = "batch"
FORM_BYTES = 64 * 1024  # of a form, besides its file
MOST_FIELDS = 8
# A browser must neither run nor show on this page's behalf what a client has uploaded.
HEADERS = {"X-Content-Type-Options": "nosniff"}
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                    },
                }
            }
        },
    }
}


@router.post(UPLOADS, openapi_extra=FORM)
async def upload(request: Request, state: State, caller: Caller) -> dict[str, Any]:
    """Keep a file, sent as a form with `file` and `purpose`."""
    files = state.batches.files(caller)
    declared = request.headers.get("content-length", "0")
    files.check_room(max(0, int(declared) - FORM_BYTES) if declared.isdigit() else 0)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise bad_request("Send a form (multipart/form-data) with `file` and `purpose`.")
    try:
        # The file is on disk while it comes in, but for its first megabyte.
        async with request.form(
            max_files=1, max_fields=MOST_FIELDS, max_part_size=FORM_BYTES
        ) as form:
            record = await _kept(files, form.get("file"), form.get("purpose"))
    except HTTPException as error:
        raise bad_request(f"The form cannot be read: {error.detail}"[:300]) from None
    except ClientDisconnect:
        raise ClientLeft from None
    return record.shown()


async def _kept(files: TenantFiles, file: Any, purpose: Any) -> FileRecord:
    if not isinstance(file, UploadFile):
        raise bad_request("file: send one, with a name.", param="file")
    if purpose != PURPOSE:
        raise bad_request(f"purpose: only {PURPOSE!r} is known here.", param="purpose")
    name = shown_name(file.filename)
    file_id = files.begin_upload(file.size or 0)
    try:
        size = await asyncio.to_thread(files.write, file_id, file.file)
        record = FileRecord(file_id, size, name, PURPOSE)
        files.add_file(record)
    except OSError as error:
        says = f"The file cannot be kept: {error.strerror}."
        raise ApiError(507, says, code="storage_full") from None
    finally:
        files.end_upload(file_id)
    return record


@router.get("/v1/files")
async def listed(
    state: State,
    caller: Caller,
    purpose: Annotated[str | None, Query(max_length=100)] = None,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The caller's files, the newest first."""
    files = state.batches.files(caller).files.values()
    found = [each for each in files if purpose in (None, each.purpose)]
    return page(found, after, limit, newest_first=order == "desc")


@router.get("/v1/files/{file_id}")
async def retrieve(file_id: str, state: State, caller: Caller) -> dict[str, Any]:
    """What is known of a file."""
    return state.batches.files(caller).file(file_id).shown()


@router.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def content(file_id: str, state: State, caller: Caller) -> Response:
    """The file itself."""
    files = state.batches.files(caller)
    record = files.file(file_id)
    return FileResponse(
        files.data(file_id), 200, HEADERS, "application/octet-stream", filename=record.filename
    )


@router.delete("/v1/files/{file_id}")
async def delete(file_id: str, state: State, caller: Caller) -> dict[str, Any]:
    """Forget a file, unless an open batch reads it."""
    state.batches.files(caller).delete_file(file_id)
    return {"id": file_id, "object": "file", "deleted": True}
