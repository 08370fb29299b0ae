"""Headers and bodies without a limit (CVE-2025-48956)."""

from __future__ import annotations

import json
import re
import socket
from urllib.parse import urlsplit

from bystander import bystander, memory_of
from patience import PATIENCE_S

START = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
MIB = 1 << 20


def send_without_end(server, start: bytes, piece: bytes, most: int) -> tuple[int, bytes]:
    """How many bytes the server took before it said no, and what it said."""
    address = ("127.0.0.1", urlsplit(server.url).port)
    sent, answer = 0, b""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        try:
            sock.sendall(start)
            while sent < most:
                sock.sendall(piece)
                sent += len(piece)
                sock.settimeout(0.001)
                try:
                    if received := sock.recv(65536):
                        answer += received
                    break
                except TimeoutError:
                    sock.settimeout(PATIENCE_S)
        except ConnectionError:
            pass
    return sent, answer


def status(answer: bytes) -> int | None:
    found = re.match(rb"HTTP/1\.1 (\d+)", answer)
    return int(found[1]) if found else None


def test_headers_end_after_some_tens_of_kilobytes(tiny_server):
    pid = tiny_server.process.pid
    before = memory_of(pid)
    with bystander(tiny_server, max_tokens=20):
        for piece in (b"X-Many: " + b"v" * 1000 + b"\r\n", b"v" * 4096):  # many, and one
            start = START if piece.startswith(b"X") else START + b"X-One: "
            sent, answer = send_without_end(tiny_server, start, piece, 64 * MIB)
            assert sent < 8 * MIB, "headers without end were taken"
            assert status(answer) in (None, 400, 431)
    assert memory_of(pid) - before < 64 * MIB


def test_bodies_end_at_the_limit(keyed_server):
    """Before any key is looked at, whether it is declared or not."""
    pid = keyed_server.process.pid
    before = memory_of(pid)
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    headers = b"Content-Type: application/json\r\n"
    start = START + headers + b"Transfer-Encoding: chunked\r\n\r\n"
    sent, answer = send_without_end(keyed_server, start, chunk, 512 * MIB)
    assert sent < 256 * MIB and status(answer) in (None, 401, 413)
    declared = START + headers + b"Content-Length: 99999999999\r\n\r\n"
    sent, answer = send_without_end(keyed_server, declared, b" " * 65536, 512 * MIB)
    assert sent < 256 * MIB and status(answer) in (None, 401, 413)
    assert memory_of(pid) - before < 256 * MIB


def test_numbers_without_end_are_no_work(tiny_server):
    """A body within its limit may still be dear to read."""
    bodies = [
        b'{"prompt": "hi", "max_tokens": ' + b"9" * 1_000_000 + b"}",
        b'{"prompt": "hi", "seed": 1e' + b"9" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 500_000 + b"}",
        json.dumps({"prompt": "hi", **{f"field{i}": i for i in range(100_000)}}).encode(),
    ]
    with tiny_server.http(headers={"Content-Type": "application/json"}) as http:
        for body in bodies:
            answer = http.post("/v1/completions", content=body)
            assert answer.status_code in (200, 400), answer.text[:300]
