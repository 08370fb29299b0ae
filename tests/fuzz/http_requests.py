"""Requests that no good client sends, to real servers with and without keys.

Bodies whose fields are anything but what they should be, every address by every method, and bytes
that are no HTTP. Whatever comes is answered by an answer or by a 4xx in the API's own shape; the
servers live, their memory is bounded, and a bystander's stream does not notice.
"""

from __future__ import annotations

import json
import random
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from bystander import bystander, memory_of
from patience import PATIENCE_S
from server_process import ServerProcess
from tiny_model import write_tiny_model

from fuzz.nasty import nasty
from fuzz.raw_http import message
from quire.models.checkpoints import demo

FULL, SMALL = 4_000, 200
KEY = "sk-known"
MORE_MEMORY = 1 << 30
# How a server may say no. A connection that is closed without a word is allowed for what is no
# HTTP at all.
REFUSALS = {400, 401, 403, 404, 405, 406, 408, 411, 413, 414, 415, 417, 421, 422, 426, 429, 431}
OPEN_TO_ALL = {
    "/", "/health", "/v1/health", "/ping", "/ready", "/v1/ready", "/load", "/v1/load", "/version",
    "/metrics", "/openapi.json", "/docs",
}  # fmt: skip
NO_METHODS = ["FETCH", "get"]  # the parser refuses them, in its own words
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", *NO_METHODS]
PATHS = ["/v1", "/v1/models/", "/v1/models/%2e%2e", "/../etc/passwd", "/%00", "/v1/embeddings",
         "/v1/load_lora_adapter", "/metrics/", "/docs", "/static/../../x", "//", "/v1//completions",
         "/health?" + "a=b&" * 500, "/" + "x" * 2000, "/v1/models/é", "/v1/models/" + "y" * 500,
         "/v1/images/generations", "/page/../../../etc/passwd", "/assets/%2e%2e%2fapp.py",
         "/admin", "/shutdown", "/reset_prefix_cache", "/collective_rpc", "/pause"]  # fmt: skip


def run(seed: int, count: int) -> Counter[str]:
    """So many requests; the statuses they got, counted."""
    with _servers() as (keyless, keyed):
        fuzz = Fuzz(keyless, keyed)
        with bystander(keyless, max_tokens=40), bystander(keyed, KEY, max_tokens=40):
            for number in range(count):
                fuzz.send(random.Random(f"http {seed}/{number}"), f"case {number} of seed {seed}")
        fuzz.check_servers()
    return fuzz.seen


class Fuzz:
    def __init__(self, keyless: ServerProcess, keyed: ServerProcess) -> None:
        self.servers = [keyless, keyed]
        self.clients = [server.http() for server in self.servers]
        self.seen: Counter[str] = Counter()
        document = self.clients[0].get("/openapi.json").json()
        self.paths = sorted(document["paths"])
        self.fields = {path: _fields(document, path) for path in self.paths}
        self.fields = {path: fields for path, fields in self.fields.items() if fields}
        assert len(self.paths) >= 9 and len(self.fields["/v1/completions"]) >= 20
        pids = [pid for server in self.servers for pid in (server.process.pid, server.engine_pid)]
        self.memory = {pid: memory_of(pid) for pid in pids}

    def send(self, dice: random.Random, name: str) -> None:
        at = dice.randrange(2)
        case = dice.choices([self._fields_case, self._path_case, self._raw_case], [6, 2, 3])[0]
        try:
            case(dice, at)
        except BaseException as error:
            error.add_note(f"{name}, {case.__name__[1:]}, {'keyed' if at else 'keyless'}")
            raise

    def check_servers(self) -> None:
        for client in self.clients:
            assert client.get("/health").status_code == 200
            client.close()
        for pid, before in self.memory.items():
            grown = memory_of(pid) - before
            assert grown < MORE_MEMORY, f"a process took {grown >> 20} MiB more"

    # --- bodies -----------------------------------------------------------------------------------

    def _fields_case(self, dice: random.Random, at: int) -> None:
        path = dice.choice(sorted(self.fields))
        body = _good_body(path)
        for _ in range(dice.choice([1, 1, 2, 4])):
            body[dice.choice([*self.fields[path], "no_such_field"])] = nasty(dice)
        if dice.random() < 0.2:
            body["stream"] = True
        headers = {"Content-Type": "application/json", **_authorization(dice, at)}
        content = json.dumps(body)  # with NaN and Infinity, as sloppy clients write them
        client = self.clients[at]
        with client.stream("POST", path, content=content, headers=headers) as response:
            if dice.random() < 0.05:
                return  # it leaves before it has read the answer
            response.read()
            self._check(response, path, content[:300], headers, at)

    # --- addresses --------------------------------------------------------------------------------

    def _path_case(self, dice: random.Random, at: int) -> None:
        path, method = dice.choice([*self.paths, *PATHS]), dice.choice(METHODS)
        headers = _authorization(dice, at)
        content = dice.choice([None, b"", b"{}", b"[" * 5000, b"\xff\xfe", b"null"])
        if dice.random() < 0.3:
            headers |= dict(dice.sample(ODD_HEADERS, 3))
        url = f"{self.servers[at].url}{path.replace('{', '%7B').replace('}', '%7D')}"
        if path in ENDLESS and method == "GET":
            return
        try:
            response = self.clients[at].request(method, url, content=content, headers=headers)
        except httpx.RemoteProtocolError:
            self.seen["closed"] += 1  # a method or a header that is no HTTP
            return
        self._check(response, path, f"{method} {path[:100]} {headers}", headers, at)

    # --- bytes ------------------------------------------------------------------------------------

    def _raw_case(self, dice: random.Random, at: int) -> None:
        content = message(dice)
        port = urlsplit(self.servers[at].url).port
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            answer = _converse(sock, content, dice)
        statuses = [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]
        self.seen.update(f"raw {status}" for status in statuses or ["closed"])
        assert all(status < 500 for status in statuses), (content[:300], answer[:500])

    def _check(
        self, response: httpx.Response, path: str, what: str, headers: dict[str, str], at: int
    ) -> None:
        status = response.status_code
        self.seen[str(status)] += 1
        told = (what, status, response.text[:500])
        assert status in REFUSALS or 200 <= status < 400, told
        if at == 1 and headers.get("Authorization") != f"Bearer {KEY}":
            is_open = path.split("?")[0] in OPEN_TO_ALL or response.request.method == "OPTIONS"
            assert is_open or status >= 300 or "html" in _kind(response) or _is_asset(path), told
        if response.request.method == "HEAD":
            assert not response.content, told
        elif status >= 400:
            is_http = response.request.method not in NO_METHODS
            assert _has_error_shape(response) or not is_http, told
            assert "Traceback" not in response.text and "object at 0x" not in response.text, told
        elif "json" in _kind(response):
            response.json()


ENDLESS = {"/page/events"}  # a page's events go on for as long as the connection is open
ODD_HEADERS = [
    ("Host", "evil.example"), ("Content-Type", "text/xml"), ("Content-Encoding", "gzip"),
    ("Accept", "nothing/at-all"), ("Range", "bytes=5-1"), ("X-Request-Id", "a" * 300),
    ("Origin", "null"), ("Authorization", "Basic Og=="), ("If-None-Match", "*"),
    ("X-Forwarded-For", "::1"), ("Upgrade", "h2c"), ("Expect", "the unexpected"),
]  # fmt: skip


@contextmanager
def _servers() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """One without keys and one with; they end without a fault."""
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as name, ExitStack() as stack:
        folder = Path(name)
        model = str(write_tiny_model(folder / "tiny", Path(demo.fetch())))
        (folder / "keys").write_text(f"{KEY}\n")
        limits = ["--max-model-len", "64", "--max-body-bytes", "2MB"]
        with_keys = ["--api-keys-file", str(folder / "keys")]
        servers = [ServerProcess.tiny(model, *limits, *more) for more in ([], with_keys)]
        for server in servers:
            stack.callback(server.stop)
        yield servers[0], servers[1]
        for server in servers:
            assert server.stop() == 0, server.log[-3000:]
            _, traceback, rest = server.log.partition("Traceback")
            assert not traceback, rest[:5000]


def _authorization(dice: random.Random, at: int) -> dict[str, str]:
    known = {"Authorization": f"Bearer {KEY}"}
    wrong = [{}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Bearer"}]
    return dice.choice([known] * 4 + wrong) if at else {}


def _good_body(path: str) -> dict[str, Any]:
    if "chat" in path:
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    if "detokenize" in path:
        return {"tokens": [1, 2, 3]}
    return {"prompt": "hi", **({} if "tokenize" in path else {"max_tokens": 2})}


def _fields(document: dict[str, Any], path: str) -> list[str]:
    """The names that a body may have, by the server's own document."""
    body = document["paths"][path].get("post", {}).get("requestBody")
    if body is None:
        return []
    if "application/json" not in body["content"]:  # a form
        return []
    schema = body["content"]["application/json"]["schema"]
    found: set[str] = set()
    for each in [schema, *schema.get("anyOf", [])]:
        if "$ref" in each:
            each = document["components"]["schemas"][each["$ref"].rsplit("/", 1)[1]]
        found |= set(each.get("properties", ()))
    return sorted(found)


def _converse(sock: socket.socket, content: bytes, dice: random.Random) -> bytes:
    """Send it, in pieces perhaps; what comes back until there is no more, or it is long enough."""
    answer = b""
    with suppress(OSError):
        at = 0
        while at < len(content):
            piece = dice.choice([1, 7, 1000, 1 << 20])
            sock.sendall(content[at : at + piece])
            at += piece if at < 200 else 1 << 20
        if dice.random() < 0.1:
            return b""  # it leaves
        if dice.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.settimeout(0.2)  # the server may wait for more, and so it should
        while len(answer) < 100_000 and (received := sock.recv(65536)):
            answer += received
    return answer


def _kind(response: httpx.Response) -> str:
    return response.headers.get("content-type", "")


def _has_error_shape(response: httpx.Response) -> bool:
    """OpenAI's, or on its own addresses Anthropic's."""
    try:
        body = response.json()
        if body.get("type") == "error":
            return {"message", "type"} <= set(body["error"]) <= {"message", "type", "details"}
        return set(body["error"]) == {"message", "type", "param", "code"}
    except (ValueError, LookupError, TypeError):
        return False


def _is_asset(path: str) -> bool:
    return path.startswith("/page")
