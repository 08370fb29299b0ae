"""What is read by GET is compressed for clients that say they take gzip.

Answers to POST never are: they are small, or streams whose events must not wait for each other.
Streams that are read again by GET are left as they are, too.
"""

from __future__ import annotations

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

LEAST_BYTES = 1024
LEVEL = 4  # higher ones take several times as long for a few percent


class CompressedReads:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._compressed = GZipMiddleware(app, minimum_size=LEAST_BYTES, compresslevel=LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = scope["type"] == "http" and scope["method"] == "GET"
        await (self._compressed if is_read else self._app)(scope, receive, send)
