"""Requests that are right in form and odd in a way: the answer says what is wrong with them."""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import pytest
from raw_http import answer, connect, head

BODY = {"prompt": "hello there", "max_tokens": 1}
JSON = {"Content-Type": "application/json"}
GETS = ["/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny",
        "/tokenizer_info", "/openapi.json", "/page/main.js", "/page/data/live"]  # fmt: skip


def post(http: httpx.Client, content: bytes, path: str = "/tokenize", **headers: str):
    return http.post(path, content=content, headers={**JSON, **headers})


def error(response: httpx.Response) -> str:
    """Its sentence; the shape is always the same."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    return body["error"]["message"]


@pytest.mark.parametrize("content", [b'{"prompt": "caf\xe9"}', b"\xff\xfe\x00"])
def test_text_that_is_not_utf_8_is_told_so(quick, content):
    with quick.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = post(http, content, path)
            assert response.status_code == 400
            assert "UTF-8" in error(response) and "Content-Type" not in error(response)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "nothing came"),
        (b"[]", "a list came"),
        (b"null", "nothing came"),
        (b"7", "a number came"),
        (b"0", "a number came"),
        (b'"x"', "a string came"),
        (b"true", "a truth value came"),
        (b"[" * 100_000, "nest less"),
        (b"{", "no JSON"),
    ],
)
def test_a_body_that_is_no_object_is_not_told_of_a_header_that_it_has(quick, content, says):
    with quick.http() as http:
        for kind in ("application/json", "application/json; charset=utf-8", "application/x+json"):
            response = post(http, content, **{"Content-Type": kind})
            assert response.status_code == 400
            assert says in error(response) and "Content-Type" not in error(response)


def test_a_body_without_its_header_is_told_of_it(quick):
    with quick.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            response = post(http, json.dumps(BODY).encode(), **{"Content-Type": kind})
            assert response.status_code == 400
            assert "Content-Type: application/json" in error(response)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "deflate", "identity"])
def test_compressed_bodies_are_read(quick, encoding):
    pack = {"deflate": zlib.compress, "identity": bytes}.get(encoding, gzip.compress)
    with quick.http() as http:
        content = pack(json.dumps(BODY).encode())
        response = post(http, content, "/v1/completions", **{"Content-Encoding": encoding})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 1


def test_damaged_and_unknown_compression(quick):
    whole = gzip.compress(json.dumps(BODY).encode())
    with quick.http() as http:
        for content in (json.dumps(BODY).encode(), whole[:-4], whole + b"x", whole + whole, b""):
            response = post(http, content, **{"Content-Encoding": "gzip"})
            assert response.status_code == 400
            assert "compressed" in error(response)
        for encoding in ("br", "zstd", "gzip, gzip", "x" * 500):
            response = post(http, whole, **{"Content-Encoding": encoding})
            assert response.status_code == 415
            assert "gzip" in error(response) and "gzip" in response.headers["accept-encoding"]
        assert http.get("/health").status_code == 200


def test_a_bomb_is_a_413(quick):
    """64 MiB of zeros in 64 KiB: no more of it than the limit is ever unpacked."""
    bomb = gzip.compress(b"\0" * (64 << 20))
    before = quick.peak_memory
    with quick.http() as http:
        for _ in range(3):
            assert post(http, bomb, **{"Content-Encoding": "gzip"}).status_code == 413
    assert quick.peak_memory - before < 48 << 20
    with quick.http() as http:
        header = b"\x1f\x8b\x08\x08" + b"\0" * 6 + b"n" * (9 << 20)  # a file's name without end
        parts = (header[at : at + 65536] for at in range(0, len(header), 65536))
        response = http.post(
            "/tokenize", content=parts, headers={**JSON, "Content-Encoding": "gzip"}
        )
        assert response.status_code == 413


@pytest.mark.parametrize("path", GETS)
def test_head_is_answered_wherever_get_is(quick, path):
    with connect(quick.url) as sock:
        sock.sendall(head(f"HEAD {path} HTTP/1.1", "Connection: close"))
        status, headers, body = answer(sock)
    with quick.http() as http:
        assert status == http.get(path).status_code == 200
    assert body is None and int(headers["content-length"]) > 0


def test_head_of_what_is_not_there(quick):
    with quick.http() as http:
        assert http.head("/nothing").status_code == 404
        refused = http.head("/v1/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert http.head("/health").status_code == 200  # on the same connection


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/tiny", "GET"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/tokenize", "POST"),
        ("POST", "/health", "GET"),
        ("PATCH", "/", "GET"),
    ],
)
def test_another_method_is_told_which_is_right(quick, method, path, allow):
    with quick.http() as http:
        response = http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allow)
        assert f"{method} {path}" in error(response) and error(response).endswith(f"use {allow}.")


def test_models_without_a_name_are_all_of_them(quick):
    with quick.http() as http:
        models = http.get("/v1/models").json()
        for path in ("/v1/models/", "/models/", "/models"):
            assert http.get(path).json() == models
        assert "'tin'" in error(http.get("/v1/models/tin"))
