"""Bodies above a size are refused before they are read."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.server.errors import ApiError


class BodyLimit:
    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        counted = _Counted(self._app, receive, send, self._max_bytes, self._error())
        await counted.run(scope)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._error().response()
        response.headers["connection"] = "close"  # what is still coming is not read
        await response(scope, receive, send)

    def _error(self) -> ApiError:
        return ApiError(
            413, f"The body is larger than {self._max_bytes:,} bytes; send less.", code="too_large"
        )


class _Counted:
    """One request whose body did not say how large it is."""

    def __init__(
        self, app: ASGIApp, receive: Receive, send: Send, max_bytes: int, error: ApiError
    ) -> None:
        self._app, self._receive, self._send = app, receive, send
        self._bytes_left = max_bytes
        self._error = error
        self._refused = False

    async def run(self, scope: Scope) -> None:
        await self._app(scope, self._count, self._pass)
        if self._refused:
            await self._error.response()(scope, self._receive, self._send)

    async def _count(self) -> Message:
        message = await self._receive()
        self._bytes_left -= len(message.get("body", b""))
        if self._bytes_left < 0:
            self._refused = True
            raise self._error
        return message

    async def _pass(self, message: Message) -> None:
        if not self._refused:  # else the application's own word for it, which is another
            await self._send(message)
