"""A request of many texts is one request: in the queue, in what is counted, and when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pooling_models import write_tiny_encoder

from quire.api.server.app import make_inner_app
from quire.api.server.keys import Keys
from quire.api.server.settings import ServerConfig
from quire.api.server.state import ServerState
from quire.config import EngineConfig
from quire.engine.process.client import EngineClient

MANY = ["the cat sat", "a dog", "old sun"] * 500


def with_server(
    folder: Path, check: Callable[[EngineClient, httpx.AsyncClient], Awaitable[None]]
) -> None:
    """Check a server whose queue is short, without a socket in between."""
    write_tiny_encoder(folder, "BertModel")
    config = EngineConfig(str(folder), load_format="dummy", device="cpu", dtype="float32")

    async def main() -> None:
        client = await EngineClient.start(config, progress=False, log_level="WARNING")
        try:
            state = ServerState(ServerConfig(max_queued_requests=4), client, "tiny", Keys())
            transport = httpx.ASGITransport(make_inner_app(state))
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
                await check(client, http)
        finally:
            await client.stop()

    asyncio.run(main())


async def ask(http: httpx.AsyncClient, texts: list[str]) -> Any:
    response = await http.post("/v1/embeddings", json={"input": texts}, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def held(client: EngineClient) -> Iterator[None]:
    """Meanwhile its engine does nothing, so that requests wait."""
    os.kill(client.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(client.pid, signal.SIGCONT)


async def sent(client: EngineClient, asking: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A request that the engine has been sent."""
    before, task = client.num_open, asyncio.create_task(asking)
    while client.num_open == before and not task.done():
        await asyncio.sleep(0)
    return task


def test_it_counts_once_and_locks_nobody_out(tmp_path: Path) -> None:
    async def check(client: EngineClient, http: httpx.AsyncClient) -> None:
        with held(client):
            asking = await sent(client, ask(http, MANY))
            assert (await http.get("/load")).json() == {"server_load": 1, "waiting": 1}
            assert client.num_waiting_tokens == (5 + 4 + 4) * 500
            other = await sent(client, ask(http, ["a dog"]))
            assert client.num_waiting == 2
        alone, many = await asyncio.gather(other, asking)
        assert len(many["data"]) == len(MANY)
        vector = alone["data"][0]["embedding"]
        np.testing.assert_allclose(many["data"][1]["embedding"], vector, atol=1e-6)

    with_server(tmp_path, check)


def test_all_of_it_ends_when_its_client_leaves(tmp_path: Path) -> None:
    async def check(client: EngineClient, http: httpx.AsyncClient) -> None:
        with held(client):
            asking = await sent(client, ask(http, MANY))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert client.num_open == client.num_waiting == client.num_waiting_tokens == 0
        stats = await client.call("stats")
        assert stats["requests"] == {"running": 0, "loading": 0, "waiting": 0}

    with_server(tmp_path, check)


def test_several_engines_share_it_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(client: EngineClient, http: httpx.AsyncClient) -> None:
        expected = await ask(http, MANY[:7])
        three = property(lambda self: dict.fromkeys("012", self))
        monkeypatch.setattr(EngineClient, "engines", three)
        with held(client):
            asking = await sent(client, ask(http, MANY[:7]))
            assert client.num_open == 3
        found = await asking
        for one, other in zip(expected["data"], found["data"], strict=True):
            assert one["index"] == other["index"]
            np.testing.assert_allclose(one["embedding"], other["embedding"], atol=1e-6)
        assert len((await ask(http, ["sun"]))["data"]) == 1

    with_server(tmp_path, check)
