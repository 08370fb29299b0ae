"""Responses that are generated while no client waits for them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from quire.api.server.errors import bad_request
from quire.api.server.responses.event_log import EventLog
from quire.api.server.responses.output import StreamEvent
from quire.api.server.responses.run import ResponseRun, as_bytes
from quire.api.server.responses.store import StoredResponse, TenantResponses


def start(run: ResponseRun, record: StoredResponse, stored: TenantResponses) -> None:
    """Store a response, and begin it. Its stream, if it has one, goes into its log."""
    record.progress = run.response
    record.log = EventLog() if run.is_streamed else None
    stored.add(record)
    if record.id not in stored:
        raise bad_request(
            "background needs room for the response among the stored ones; see "
            "--max-stored-responses and --max-stored-response-bytes.",
            param="background",
        )
    record.task = asyncio.create_task(_generate(run, record, stored))
    # Not in the coroutine, which is never entered if it is cancelled at once.
    record.task.add_done_callback(lambda task: _end(task, run, record, stored))


async def cancel(record: StoredResponse) -> None:
    """Stop a response that is generated; one that has ended stays as it is."""
    if record.task is not None:
        record.task.cancel()
        await asyncio.wait({record.task})


async def _generate(run: ResponseRun, record: StoredResponse, stored: TenantResponses) -> None:
    try:
        async with aclosing(run.events()) as told:
            async for events in told:
                _note(events, record, stored)
    except Exception as error:
        _note(run.fail(error), record, stored)


def _note(events: list[StreamEvent], record: StoredResponse, stored: TenantResponses) -> None:
    if record.log is not None:
        record.log.add(as_bytes(events))
        stored.recount(record)


def _end(
    task: asyncio.Task[None], run: ResponseRun, record: StoredResponse, stored: TenantResponses
) -> None:
    if task.cancelled():
        _note(run.cancel(), record, stored)
    record.end(run.response())
    stored.recount(record)
    if record.log is not None:
        record.log.close()
