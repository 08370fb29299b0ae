"""A client that leaves stops being computed for, whatever it was waiting for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from patience import PATIENCE_S, eventually
from server_process import ServerProcess
from tcp_proxy import TcpProxy

LEAVES = httpx.Timeout(PATIENCE_S, read=0.5)
LONG = {"prompt": "Go on", "max_tokens": 8000, "ignore_eos": True}


def generated(http: httpx.Client) -> float:
    """How many tokens the server has generated so far."""
    [line] = [
        line
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("vllm:generation_tokens_total")
    ]
    return float(line.split()[-1])


@contextmanager
def none_of_it_is_computed(server: ServerProcess) -> Iterator[None]:
    """A short request gets its turn only when the long ones have gone: there are two places."""
    with server.http() as http:
        before = generated(http)
        yield
        answer = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert answer.status_code == 200
        eventually(lambda: generated(http) > before)
        assert generated(http) - before < LONG["max_tokens"]  # no long one has come to its end


def url_of(server: ServerProcess, proxied: bool) -> tuple[str, TcpProxy | None]:
    if not proxied:
        return server.url, None
    proxy = TcpProxy(urlsplit(server.url).port)
    return f"http://127.0.0.1:{proxy.port}", proxy


@pytest.mark.parametrize("proxied", [False, True])
def test_leaving_a_stream(quick, proxied):
    url, proxy = url_of(quick, proxied)
    with none_of_it_is_computed(quick):
        for _ in range(3):
            with (
                httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
                http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
            ):
                assert next(response.iter_lines()).startswith("data: ")
    if proxy is not None:
        proxy.vanish()


@pytest.mark.parametrize("proxied", [False, True])
def test_leaving_before_the_answer(quick, proxied):
    url, proxy = url_of(quick, proxied)
    with none_of_it_is_computed(quick):
        for _ in range(3):  # the third waits in the queue
            http = httpx.Client(base_url=url, timeout=LEAVES)
            with http, pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=LONG)
    if proxy is not None:
        proxy.vanish()


def test_leaving_the_queue_of_a_stream(quick):
    body = {**LONG, "stream": True}
    with none_of_it_is_computed(quick), ExitStack() as stack:
        for _ in range(2):
            http = stack.enter_context(quick.http())
            response = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            lines = response.iter_lines()
            assert next(lines)
            stack.callback(lines.close)
        with (
            httpx.Client(base_url=quick.url, timeout=LEAVES) as http,
            pytest.raises(httpx.ReadTimeout),
        ):
            http.post("/v1/completions", json=body)
