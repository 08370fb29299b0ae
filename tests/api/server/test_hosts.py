"""A name that a stranger can point at the server is not answered: DNS rebinding."""

from __future__ import annotations

import asyncio
import socket

import pytest
from raw_http import head, send

from quire.api.server.http.hosts import HostCheck
from quire.api.server.settings import ServerConfig

LOOPBACK = ["localhost", "LOCALHOST:1", "localhost.", "app.localhost", "127.0.0.1:80", "127.9.9.9",
            "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]"]  # fmt: skip
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
           "evil-localhost", "10.0.0.5", "[fd00::1]", "[::1", "[::1]x", "*", ".",
           "localhost evil", "\xe9"]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_names_of_loopback_are_answered(quick, host):
    assert send(quick.url, head(host=host))[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names_are_told_of_the_flag(quick, host):
    status, _, body = send(quick.url, head(host=host))
    assert (status, body["error"]["code"]) == (421, "host_not_allowed")
    assert "--allowed-host" in body["error"]["message"]


@pytest.mark.parametrize(
    "line", ["GET / HTTP/1.1", "GET /page/data/journal HTTP/1.1", "GET /metrics HTTP/1.1",
             "POST /v1/completions HTTP/1.1", "OPTIONS /v1/completions HTTP/1.1",
             "HEAD /health HTTP/1.1", "GET /nothing HTTP/1.1"],
)  # fmt: skip
def test_nothing_is_shown_to_a_foreign_name(quick, line):
    assert send(quick.url, head(line, "Connection: close", host="evil.example"))[0] == 421


def test_the_target_counts_where_it_has_a_host(quick):
    for target, status in [("http://evil.example/health", 421), ("http://localhost:1/health", 200),
                           ("http://localhost@evil.example/health", 421)]:  # fmt: skip
        assert send(quick.url, head(f"GET {target} HTTP/1.1"))[0] == status


def test_there_is_one_host(quick):
    for request, status in [
        (head(host=None), 400),
        (head(host=""), 400),
        (head("GET /health HTTP/1.1", "Host: evil.example"), 400),
        (head("GET /health HTTP/1.0", host=None), 200),  # as health checks of balancers come
        (head("GET /health HTTP/1.0", host="evil.example"), 421),
    ]:
        assert send(quick.url, request)[0] == status


def test_allowed_names_are_answered(guarded):
    for host, status in [
        ("gpu.lan", 200),
        ("GPU.lan.:8000", 200),
        ("other.lan", 421),
        ("a.corp.example", 200),
        ("corp.example.evil.example", 421),
        ("localhost", 200),
    ]:
        assert send(guarded.url, head(host=host))[0] == status, host


def is_answered(host: str, bound: str, *allowed: str, here: str = "127.0.0.1") -> bool:
    """By a server that is bound to an address which this machine may not have."""
    statuses: list[int] = []

    async def app(scope, receive, send):
        statuses.append(200)

    async def send(message):
        statuses.extend([message["status"]] if "status" in message else [])

    headers = [(b"host", host.encode())]
    scope = {"type": "http", "http_version": "1.1", "path": "/", "headers": headers}
    scope["server"] = (here, 8000)
    check = HostCheck(app, ServerConfig(host=bound, allowed_host=allowed))
    asyncio.run(check(scope, None, send))
    return statuses == [200]


def test_what_counts_as_the_bound_address():
    assert is_answered("192.168.1.5:8000", "192.168.1.5", here="192.168.1.5")
    assert is_answered("[fe80::1%25eth0]", "fe80::1%eth0", here="fe80::1%eth0")
    assert is_answered("gpu-box", "gpu-box", here="192.168.1.5")
    assert is_answered("192.168.1.5", "gpu-box", here="192.168.1.5")
    assert not is_answered("192.168.1.6", "192.168.1.5", here="192.168.1.5")
    for everywhere in ("0.0.0.0", "::"):
        assert is_answered("10.244.0.17:8000", everywhere, here="172.17.0.2")
        assert is_answered("[fd00::1]:8000", everywhere)
        assert is_answered(socket.gethostname(), everywhere)
        assert not is_answered("evil.example", everywhere)
        assert is_answered("evil.example", everywhere, "*")
