"""What a connection may cost: how large a head, how long a wait, how much that is never read."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import requests
from patience import PATIENCE_S
from raw_http import answer, connect, head, is_closed, send
from server_process import ServerProcess

MB = 1024**2
JSON = ["Content-Type: application/json", "Authorization: Bearer sk-one"]
POST = "POST /v1/completions HTTP/1.1"


@pytest.fixture(scope="module")
def hasty(tiny: str) -> Iterator[ServerProcess]:
    """With little patience, and ten connections."""
    times = ["--request-seconds", "1", "--keep-alive-seconds", "1", "--unread-seconds", "1"]
    server = ServerProcess.tiny(tiny, *times, "--max-connections", "10")
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


# --- how large ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "more", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ", b"x" * 65536, 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X-Many: many\r\n" * 5000, 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"x" * 65536, 431),
        (b"GET /", b"x" * 65536, 414),
        (b"", b"\r\n" * 32768, 431),
        (head("POST /tokenize HTTP/1.1", "Transfer-Encoding: chunked"), b"0" * 65536, 431),
        (
            head("POST /tokenize HTTP/1.1", "Transfer-Encoding: chunked") + b"0\r\n",
            b"X-Trailer: many\r\n" * 5000,
            431,
        ),
    ],
    ids=["value", "headers", "name", "line", "empty lines", "chunk", "trailers"],
)
def test_a_head_without_end_is_a_431_and_costs_nothing(quick, start, more, status):
    before = quick.peak_memory
    with connect(quick.url) as sock:
        with suppress(ConnectionError):
            sock.sendall(start)
            for _ in range(64 * MB // len(more)):
                sock.sendall(more)
        found, headers, body = answer(sock)
    assert (found, body["error"]["type"]) == (status, "invalid_request_error")
    assert headers["x-request-id"]
    assert quick.peak_memory - before < 16 * MB


def test_a_head_within_the_limit_is_taken(quick):
    cookies = [f"X-Cookie-{i}: {'x' * 1000}" for i in range(60)]
    assert send(quick.url, head("GET /health HTTP/1.1", *cookies))[0] == 200


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"HELO there\r\n\r\n"])
def test_what_is_no_http_is_told_so(quick, garbage):
    status, headers, body = send(quick.url, garbage * 10)
    assert (status, headers["connection"]) == (400, "close")
    assert set(body["error"]) == {"message", "type", "param", "code"}


# --- how long -----------------------------------------------------------------------------------


def test_a_connection_without_a_request_is_closed(hasty):
    with connect(hasty.url) as sock:
        assert answer(sock)[0] == 0


@pytest.mark.parametrize(
    "half",
    [
        b"GET /health HT",
        head()[:-2],
        head(POST, *JSON, "Content-Length: 100") + b'{"prompt',
        head(POST, *JSON, "Transfer-Encoding: chunked") + b"100\r\n{",
        head() + b"GET /hea",  # behind one that was answered
    ],
    ids=["line", "head", "body", "chunk", "second"],
)
def test_half_a_request_is_a_408_and_the_end(hasty, half):
    with connect(hasty.url) as sock:
        sock.sendall(half)
        status, headers, body = answer(sock)
        if half.startswith(head()):
            assert status == 200
            assert is_closed(sock)
            return
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"
        assert is_closed(sock)


def test_a_body_that_trickles_is_not_waited_for(hasty):
    with connect(hasty.url) as sock:
        sock.sendall(head(POST, *JSON, "Content-Length: 100000"))
        with suppress(ConnectionError):
            for _ in range(600):  # each byte is progress, and a thousandth of a second
                sock.sendall(b" ")
                time.sleep(0.1)
                sock.settimeout(0.001)
                with suppress(TimeoutError):
                    if sock.recv(1, socket.MSG_PEEK):
                        break
                sock.settimeout(60)
        sock.settimeout(60)
        assert answer(sock)[0] == 408


def test_a_connection_that_is_not_used_again_is_closed(hasty):
    with connect(hasty.url) as sock:
        sock.sendall(head())
        assert answer(sock)[0] == 200
        assert is_closed(sock)


def test_an_answer_may_take_longer_than_a_request(hasty):
    body = {"prompt": "Go on", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with (
        hasty.http() as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        time.sleep(1.5)
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_client_that_never_reads_is_left(hasty):
    """Its stream ends, and what was written for it goes away with the connection."""
    body = json.dumps(
        {"prompt": [5] * 16, "n": 64, "max_tokens": 400, "ignore_eos": True, "stream": True,
         "logprobs": 20}
    ).encode()  # fmt: skip
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        parts = urlsplit(hasty.url)
        sock.connect((parts.hostname, parts.port))
        sock.sendall(head(POST, *JSON, f"Content-Length: {len(body)}") + body)
        deadline = time.monotonic() + 120
        while connections_of(hasty):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_idle_connections_leave_room_for_others(hasty):
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(hasty.url)) for _ in range(40)]
        assert all(is_closed(sock) for sock in idle)
        assert send(hasty.url, head())[0] == 200


def test_more_connections_than_the_server_takes_are_told_so(guarded):
    with ExitStack() as stack:
        for _ in range(10):
            sock = stack.enter_context(connect(guarded.url))
            sock.sendall(head())
            assert answer(sock)[0] == 200
        one_more = stack.enter_context(connect(guarded.url))
        status, headers, body = answer(one_more)
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert headers["retry-after"]
    deadline = time.monotonic() + PATIENCE_S
    while send(guarded.url, head())[0] != 200:  # that the others have left is noticed soon
        assert time.monotonic() < deadline


def connections_of(server: ServerProcess) -> int:
    """How many the server's process holds."""
    port = urlsplit(server.url).port
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    held = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] in ("01", "08")]
    return len(held)


# --- answers that come before the body is whole -------------------------------------------------


def large(url: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """By Python's own client, which sends everything before it reads."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("keep", ["keep-alive", "close"])
def test_a_413_arrives(strict, keep):
    """Also where the client sends a hundred times what is taken."""
    for size in [200_000] * 8 + [10 * MB] * 2:
        headers = {"Authorization": "Bearer sk-one", "Connection": keep}
        status, body = large(strict.url, "/v1/completions", b"x" * size, **headers)
        assert (status, json.loads(body)["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {}, 401),
        ("/v1/completions", {"Authorization": "Bearer sk-wrong"}, 401),
        ("/no/such/path", {"Authorization": "Bearer sk-one"}, 404),
        ("/v1/models", {"Authorization": "Bearer sk-one"}, 405),
        ("/v1/completions", {"Authorization": "Bearer sk-one", "X-Long": "x" * 66_000}, 431),
        ("/v1/completions", {"Authorization": "Bearer sk-one", "Host": "evil.example"}, 421),
    ],
)
@pytest.mark.parametrize("keep", ["keep-alive", "close"])
def test_other_refusals_arrive_too(quick, strict, path, headers, status, keep):
    size = 90_000 if status in (401, 404, 405) else 10 * MB
    for _ in range(3):
        found, body = large(strict.url, path, b"x" * size, Connection=keep, **headers)
        assert found == status
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_413_arrives_at_every_client(strict):
    key = {"Authorization": "Bearer sk-one"}
    url = f"{strict.url}/v1/completions"
    body = {"model": "tiny", "prompt": "x" * 5 * MB}

    def parts():
        for _ in range(50):
            yield b"x" * 100_000

    assert httpx.post(url, json=body, headers=key, timeout=120).status_code == 413
    assert httpx.post(url, content=parts(), headers=key, timeout=120).status_code == 413
    assert requests.post(url, json=body, headers=key, timeout=120).status_code == 413
    assert requests.post(url, data=parts(), headers=key, timeout=120).status_code == 413
    with pytest.raises(openai.APIStatusError) as caught, strict.openai("sk-one") as client:
        client.completions.create(**body)
    assert caught.value.status_code == 413
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, b"x" * 5 * MB, key), timeout=120)
    assert refused.value.code == 413
    refused.value.close()


def test_the_connection_of_a_413_can_be_used_again(strict):
    with connect(strict.url) as sock:
        for size in (0, 300_000, 0):
            sock.sendall(head("POST /tokenize HTTP/1.1", *JSON, f"Content-Length: {size}"))
            sock.sendall(b"x" * size)
            assert answer(sock)[0] == (413 if size else 400)


def test_a_body_without_end_is_not_read_for_ever(hasty):
    """It has its answer; a while later it is cut off."""
    cut = threading.Event()
    with connect(hasty.url) as sock:
        sock.sendall(head("POST /nothing HTTP/1.1", f"Content-Length: {1 << 50}"))
        assert answer(sock)[0] == 413

        def send_on() -> None:
            with suppress(ConnectionError):
                while True:
                    sock.sendall(b"x" * MB)
            cut.set()

        threading.Thread(target=send_on, daemon=True).start()
        assert cut.wait(120)


# --- other protocols ----------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["Content-Length: 22", "Transfer-Encoding: chunked"])
def test_a_request_that_asks_for_http_2_is_answered_in_http_1(quick, framing):
    """As Java's client and `curl --http2` ask, with a body or without; the next is read, too."""
    upgrade = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAA"]
    body = b'{"prompt": "hi there"}'
    whole = body if "Length" in framing else b"16\r\n" + body + b"\r\n0\r\n\r\n"
    with connect(quick.url) as sock:
        for _ in range(2):
            sock.sendall(head("POST /tokenize HTTP/1.1", *JSON, *upgrade, framing))
            sock.sendall(whole[:5])
            time.sleep(0.05)  # it comes in two parts
            sock.sendall(whole[5:])
            status, _, told = answer(sock)
            assert status == 200 and told["count"] > 0
            sock.sendall(head("GET /v1/models HTTP/1.1", *upgrade))
            assert answer(sock)[2]["data"][0]["id"] == "tiny"
            sock.sendall(head("POST /tokenize HTTP/1.1", *JSON, framing) + whole)
            assert answer(sock)[0] == 200
        sock.sendall(head("POST /tokenize HTTP/1.1", *upgrade, "Transfer-Encoding: chunked"))
        sock.sendall(b"no chunk\r\n")
        assert answer(sock)[0] == 400
