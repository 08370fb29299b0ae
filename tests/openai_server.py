"""A small server with OpenAI's API that streams with known delays, and fails when it is told to."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from patience import PATIENCE_S


@dataclass
class Manners:
    """How the server answers, whatever it is asked."""

    first: float = 0.02  # seconds to the first token
    between: float = 0.004  # to each next one
    together: int = 0  # but for the first, no request is answered before so many have come
    at_once: int = 1  # tokens in one event
    api_key: str | None = None
    usage: bool = True
    unknown: str | None = None  # a field that is refused
    newline: str = "\n"
    fails: dict[int, str] = field(default_factory=dict)  # the n-th request, and how


class OpenAIServer:
    """Runs in a thread of its own; `bodies` are the requests that came, in order."""

    def __init__(self, manners: Manners | None = None) -> None:
        self.manners = manners or Manners()
        self.bodies: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        manners, fate = self.manners, self.manners.fails.get(len(self.bodies) - 1)
        if manners.api_key and request.headers.get("Authorization") != f"Bearer {manners.api_key}":
            return web.json_response({"error": {"message": "Wrong key."}}, status=401)
        if manners.unknown in body:
            message = f"Unrecognized request argument supplied: {manners.unknown}"
            return web.json_response({"error": {"message": message}}, status=400)
        if fate == "busy":
            return web.json_response({"error": {"message": "Try later."}}, status=503)
        if fate == "plain":
            return web.json_response({"choices": [{"text": "no stream"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(request, response, body, fate)
        return response

    async def _have_come(self, count: int) -> bool:
        for _ in range(int(PATIENCE_S / 0.01)):
            if len(self.bodies) == 1 or len(self.bodies) >= count:
                return True
            await asyncio.sleep(0.01)
        return False

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, body: Any, fate: str | None
    ) -> None:
        manners, count = self.manners, body["max_tokens"]
        is_chat = "messages" in body
        await asyncio.sleep(manners.first)
        if not await self._have_come(manners.together):
            request.transport.close()
            return
        await self._send(response, ": a comment")
        if is_chat:
            await self._send_choice(response, {"delta": {"role": "assistant", "content": ""}})
        for at in range(0, count, manners.at_once):
            if at:
                await asyncio.sleep(manners.between)
            for number in range(at, min(at + manners.at_once, count)):
                await self._send_choice(response, _token(number, is_chat))
            if fate == "drop":
                request.transport.close()
                return
            if fate == "hang":
                await asyncio.sleep(3600)
            if fate == "error":
                return await self._send_data(response, {"error": {"message": "Out of luck."}})
            if fate == "cut":
                return
        last = {"delta": {}} if is_chat else {"text": ""}
        await self._send_choice(response, last | {"finish_reason": "length"})
        if manners.usage:
            usage = {"prompt_tokens": 10, "completion_tokens": count}
            usage["prompt_tokens_details"] = {"cached_tokens": 4}
            await self._send_data(response, {"choices": [], "usage": usage})
        await self._send(response, "data: [DONE]")

    async def _send_choice(self, response: web.StreamResponse, choice: dict[str, Any]) -> None:
        await self._send_data(response, {"choices": [{"finish_reason": None, **choice}]})

    async def _send_data(self, response: web.StreamResponse, data: dict[str, Any]) -> None:
        await self._send(response, f"data: {json.dumps(data)}")

    async def _send(self, response: web.StreamResponse, event: str) -> None:
        await response.write((event + 2 * self.manners.newline).encode())


def _token(number: int, is_chat: bool) -> dict[str, Any]:
    text = f" {number}"
    return {"delta": {"content": text}} if is_chat else {"text": text}
