"""Requests that come from the server itself: the same routes, without a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Scope

from quire.api.server.batch.lines import InputLine
from quire.api.server.http.request_ids import HEADER
from quire.api.server.keys import CALLER, Tenant

# Those that the server has can be asked for in a batch.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/classify",
)


def endpoints_of(routers: Iterable[APIRouter]) -> list[str]:
    routes = (route for router in routers for route in router.routes)
    paths = {route.path for route in routes if isinstance(route, APIRoute)}
    return [each for each in ENDPOINTS if each in paths]


class InProcessClient:
    """Asks an application in a tenant's name, behind all requests that have a connection."""

    def __init__(self, app: ASGIApp, caller: Tenant) -> None:
        self._app = app
        self._caller = replace(caller, in_background=True)

    async def ask(self, line: InputLine, turn: int = 0) -> tuple[int, Any]:
        """The status and the body of the answer; lines that wait come in order of their turns."""
        body = json.dumps(line.body).encode()
        request, answer = _Request(body), _Answer()
        try:
            await self._app(self._scope(line, len(body), turn), request.receive, answer.send)
        except Exception:
            if not answer.status:
                raise
            # Its log has the reason: what fails unforeseen is raised again after it is answered.
        return answer.status, json.loads(answer.body)

    def _scope(self, line: InputLine, num_bytes: int, turn: int) -> Scope:
        headers = {
            b"content-type": b"application/json",
            b"content-length": str(num_bytes).encode(),
            HEADER: line.result_id.encode(),
        }
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": line.url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": list(headers.items()),
            "client": None,
            "server": None,
            CALLER: replace(self._caller, turn=turn),
        }


class _Request:
    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # it never disconnects
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
