"""Unbounded `n`; images or URLs fetched on behalf of a caller.

CVE-2026-34756, CVE-2026-22773, CVE-2026-0599.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def listener() -> Iterator[tuple[str, list[object]]]:
    """An address that notes each connection to it."""
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, peer = server.accept()
                except OSError:
                    return
                came.append(peer)
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x.png", came
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("field", ["n", "best_of", "beam_width", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [129, 10**6, 2**31, 2**63, 10**30])
def test_how_many_is_bounded(tiny_server, field, value):
    body = {"prompt": "hi", "max_tokens": 1, field: value}
    if field == "beam_width":
        body |= {"use_beam_search": True, "n": value}
    with tiny_server.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400 or field == "beam_width", answer.text
    assert answer.status_code == 400 or len(answer.json()["choices"]) <= 128


def test_no_address_that_a_caller_names_is_opened(tiny_server):
    with listener() as (url, came), tiny_server.http() as http:
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "file", "file": {"file_data": url}},
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        ]
        for part in parts:
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert "root:" not in answer.text
        for schema in ({"$ref": url}, {"$id": url, "$ref": "x"}, {"$schema": url, "$ref": url}):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
            assert http.post("/v1/chat/completions", json=body).status_code == 400
        assert http.post("/v1/completions", json={"prompt": "hi", "model": url}).status_code == 404
        assert not came
