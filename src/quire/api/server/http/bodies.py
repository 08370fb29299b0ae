"""Request bodies: which clients may send one, how large it may be, and how it is compressed.

All of it is decided before the application sees a byte. When a body is refused, the connection
reads the rest of it (`connection.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.server.errors import ApiError, bad_request
from quire.api.server.keys import Keys

PLAIN, COMPRESSED = ("", "identity"), ("gzip", "x-gzip", "deflate")
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib finds out which


class Bodies:
    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        keys: Keys | None = None,
        uploads: Mapping[str, int] | None = None,
    ) -> None:
        """With `keys`, the body of a request is read only if the request has a key.

        `uploads`: by path, how large bodies may be that do not stay in memory.
        """
        self._app = app
        self._max_bytes = max_bytes
        self._uploads = uploads or {}
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            decoders = self._admitted(headers, self._uploads.get(scope["path"], self._max_bytes))
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
            return
        await _Body(self._app, receive, send, decoders).run(scope)

    def _admitted(self, headers: Headers, max_bytes: int) -> list[_Decoder]:
        """The filter that the body passes through; ApiError if the body is refused at once."""
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > max_bytes:
            raise too_large(max_bytes)
        if self._keys and (declared != "0" or "transfer-encoding" in headers):
            self._keys.tenant(headers.get("authorization"), headers.get("x-api-key"))
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding in PLAIN:
            return [_Limit(max_bytes)]
        if encoding in COMPRESSED:
            return [_Limit(max_bytes), _Inflater(max_bytes)]
        raise ApiError(
            415,
            f"A body in the encoding {encoding[:100]!r} is not understood; send it plain, or with "
            "`Content-Encoding: gzip`.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "gzip, deflate"},
        )


def too_large(max_bytes: int) -> ApiError:
    says = f"The body is larger than {max_bytes:,} bytes; send less."
    return ApiError(413, says, code="too_large")


class _Decoder(Protocol):
    def push(self, data: bytes, is_last: bool) -> bytes:
        """The next bytes for the application; ApiError if they are refused."""
        ...


class _Limit:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    def push(self, data: bytes, is_last: bool) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise too_large(self._max_bytes)
        return data


class _Inflater:
    """Never makes more than one byte above the limit, whatever the compressed bytes promise."""

    def __init__(self, max_bytes: int) -> None:
        self._limit = _Limit(max_bytes)
        self._left = max_bytes
        self._inflate = zlib.decompressobj(GZIP_OR_ZLIB)

    def push(self, data: bytes, is_last: bool) -> bytes:
        try:
            inflated = self._inflate.decompress(data, self._left + 1)
        except zlib.error:
            raise bad_request("The compressed body is damaged; send it again, or plain.") from None
        self._left -= len(inflated)
        self._limit.push(inflated, is_last)
        if self._inflate.unused_data or (is_last and not self._inflate.eof):
            raise bad_request("The body must be one compressed stream, and all of it.")
        return inflated


class _Body:
    """The body of one request, on its way to the application."""

    def __init__(
        self, app: ASGIApp, receive: Receive, send: Send, decoders: list[_Decoder]
    ) -> None:
        self._app, self._receive, self._send = app, receive, send
        self._decoders = decoders
        self._refusal: ApiError | None = None

    async def run(self, scope: Scope) -> None:
        await self._app(scope, self._receive_decoded, self._send_unless_refused)
        if self._refusal is not None:
            await self._refusal.response(scope)(scope, self._receive, self._send)

    async def _receive_decoded(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        body, more = message.get("body", b""), message.get("more_body", False)
        try:
            for decoder in self._decoders:
                body = decoder.push(body, not more)
        except ApiError as error:
            self._refusal = error
            raise
        return {**message, "body": body}

    async def _send_unless_refused(self, message: Message) -> None:
        if self._refusal is None:  # else the client gets the refusal, not the application's answer
            await self._send(message)
