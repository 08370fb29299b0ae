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
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._error().response()
        response.headers["connection"] = "close"  # what is still coming is not read
        await response(scope, receive, send)

    def _error(self) -> ApiError:
        return ApiError(
            413, f"The body is larger than {self._max_bytes:,} bytes; send less.", code="too_large"
        )
