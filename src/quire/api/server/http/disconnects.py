"""Answers that stop when their client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from quire.api.server.errors import ApiError, ClientLeft, as_api_error
from quire.api.server.http.json_answers import as_json

T = TypeVar("T")

ErrorWriter = Callable[[ApiError], bytes]  # how an API ends a stream that fails

DONE = b"data: [DONE]\n\n"


def event(message: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event; APIs that name theirs have the name on a line of its own."""
    data = b"data: %b\n\n" % as_json(message)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


def _openai_error(error: ApiError) -> bytes:
    return event(error.body()) + DONE


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The first is awaited before the status is sent, so that what fails until
    then fails as any other request does; what fails later is the stream's last event."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], write_error: ErrorWriter
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._write_error = write_error

    @classmethod
    async def begin(
        cls,
        request: Request,
        events: AsyncGenerator[bytes, None],
        write_error: ErrorWriter = _openai_error,
    ) -> EventStream:
        first = await while_connected(request.receive, _next(events))
        return cls(first, events, write_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for chunk in self._rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            last = self._write_error(as_api_error(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            # The request is aborted now, and not when the garbage is collected.
            await self._rest.aclose()
        await send({"type": "http.response.body", "body": b""})


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
