"""A client that leaves stops being computed for, whatever it was waiting for."""

from __future__ import annotations

import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from server_process import ServerProcess
from tcp_proxy import TcpProxy

LONG = {"prompt": "Go on", "max_tokens": 8000, "ignore_eos": True}


def wait_until_idle(server: ServerProcess) -> None:
    """A short request gets its turn only when the long ones have gone: there are two places."""
    with server.http() as http:
        started = time.monotonic()
        answer = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert answer.status_code == 200
        assert time.monotonic() - started < 10  # the long ones take minutes


def url_of(server: ServerProcess, proxied: bool) -> tuple[str, TcpProxy | None]:
    if not proxied:
        return server.url, None
    proxy = TcpProxy(urlsplit(server.url).port)
    return f"http://127.0.0.1:{proxy.port}", proxy


@pytest.mark.parametrize("proxied", [False, True])
def test_leaving_a_stream(quick, proxied):
    url, proxy = url_of(quick, proxied)
    for _ in range(3):
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
        ):
            assert next(response.iter_lines()).startswith("data: ")
    wait_until_idle(quick)
    if proxy is not None:
        proxy.vanish()


@pytest.mark.parametrize("proxied", [False, True])
def test_leaving_before_the_answer(quick, proxied):
    url, proxy = url_of(quick, proxied)
    for _ in range(3):  # the third waits in the queue
        with httpx.Client(base_url=url, timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG)
    wait_until_idle(quick)
    if proxy is not None:
        proxy.vanish()


def test_leaving_the_queue_of_a_stream(quick):
    body = {**LONG, "stream": True}
    with ExitStack() as stack:
        for _ in range(2):
            http = stack.enter_context(quick.http())
            response = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            lines = response.iter_lines()
            assert next(lines)
            stack.callback(lines.close)
        with (
            httpx.Client(base_url=quick.url, timeout=0.5) as http,
            pytest.raises(httpx.ReadTimeout),
        ):
            http.post("/v1/completions", json=body)
    wait_until_idle(quick)
