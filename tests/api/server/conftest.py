"""One server for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client
