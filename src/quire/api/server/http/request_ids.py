"""The id that joins an answer to the logs: the client's `X-Request-Id`, or a new one.

Every response has it in that header, and in the one where Anthropic's client looks for it; the
answer's own `id`, the log's line, the span and the page's story have it behind
the API's prefix, such as `chatcmpl-…`.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
HEADERS = (HEADER, b"request-id")
ACCEPTED = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")  # nothing that a log or a page has to escape

_current: ContextVar[str] = ContextVar("request_id", default="")


def current_id() -> str:
    """The id of the request that the current task answers."""
    return _current.get()


def answer_id(prefix: str) -> str:
    return f"{prefix}-{current_id()}"


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        request_id = given if ACCEPTED.fullmatch(given) else uuid.uuid4().hex.encode()
        _current.set(request_id.decode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [(name, request_id) for name in HEADERS]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        await self._app(scope, receive, send_with_id)
