"""HTTP by hand, for what no client would send."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 120.0


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), DEADLINE_S)


def head(
    line: str = "GET /health HTTP/1.1", *headers: str, host: str | None = "localhost"
) -> bytes:
    lines = [line, *([f"Host: {host}"] if host is not None else []), *headers]
    return "".join(f"{each}\r\n" for each in lines).encode() + b"\r\n"


def answer(sock: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of one response; status 0 if the connection ends without any."""
    with sock.makefile("rb") as file:
        first = file.readline()
        if not first:
            return 0, {}, None
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = file.read(int(headers.get("content-length", 0)))
    is_json = body and headers["content-type"] == "application/json"
    return int(first.split()[1]), headers, json.loads(body) if is_json else None


def is_closed(sock: socket.socket) -> bool:
    """Wait for the other side to close; whatever it still says is left."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def send(url: str, data: bytes) -> tuple[int, dict[str, str], Any]:
    with connect(url) as sock:
        sock.sendall(data)
        return answer(sock)
