"""A client that leaves stops being computed for, whatever it was waiting for."""

from __future__ import annotations

import json
import socket
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


def measure(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return float(line.split()[-1])


def generated(http: httpx.Client) -> float:
    """How many tokens the server has generated so far."""
    return measure(http, "vllm:generation_tokens_total")


@contextmanager
def none_of_it_is_computed(server: ServerProcess) -> Iterator[None]:
    """A short request gets its turn, and then nothing runs, though no long one is at its end."""
    with server.http() as http:
        before = generated(http)
        yield
        answer = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert answer.status_code == 200
        eventually(lambda: measure(http, "vllm:num_requests_running") == 0)
        assert generated(http) - before < LONG["max_tokens"]


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
                httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False) as http,
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
            http = httpx.Client(base_url=url, timeout=LEAVES, verify=False)
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
            httpx.Client(base_url=quick.url, timeout=LEAVES, verify=False) as http,
            pytest.raises(httpx.ReadTimeout),
        ):
            http.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_with_another_request_behind(quick, stream):
    """Both on one connection, which the server reads on while it answers the first."""
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with none_of_it_is_computed(quick), quick.http() as http:
        before = generated(http)
        with socket.create_connection(("127.0.0.1", urlsplit(quick.url).port)) as sock:
            sock.sendall(2 * request)
            eventually(lambda: generated(http) > before)
