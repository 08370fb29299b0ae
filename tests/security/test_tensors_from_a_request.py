"""Tensors or embeddings from a request, sparse or pickled (CVE-2025-62164)."""

from __future__ import annotations

import base64
import io
import os
import pickle

import pytest
import torch


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def payloads(path: str) -> list[str]:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[2**40]]), torch.ones(1), (2**41,), is_coalesced=True
    )
    file = io.BytesIO()
    torch.save(sparse, file)
    return [
        base64.b64encode(content).decode()
        for content in (pickle.dumps(Bomb(path)), file.getvalue())
    ]


@pytest.mark.parametrize("field", ["prompt_embeds", "prompt_embed", "embeds", "input_embeds"])
def test_they_are_never_opened(tiny_server, tmp_path, field):
    trap = tmp_path / "sprung"
    with tiny_server.http() as http:
        for payload in payloads(str(trap)):
            alone = http.post("/v1/completions", json={field: payload, "max_tokens": 1})
            assert alone.status_code == 400
            beside = {"prompt": "hi", field: payload, "max_tokens": 1}
            assert http.post("/v1/completions", json=beside).status_code in (200, 400)
            part = {"type": "image_embeds", "image_embeds": payload}
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            assert http.post("/v1/chat/completions", json=body).status_code == 400
            asked = {"input": payload, "model": "tiny"}
            assert http.post("/v1/embeddings", json=asked).status_code in (400, 404)
    assert not trap.exists()
