"""Servers that the tests share: one with a real model, and one that is small and strict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import openai
import pytest
from pooling_models import write_tiny_encoder
from server_process import ServerProcess
from tiny_model import write_thinking_model, write_tiny_model

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
KEYS = "sk-one\nsk-two\nsk-three family\nsk-four family\n"


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The demo model, with all settings as they come: its matrices stay as the file has them."""
    yield from _running(ServerProcess("--dtype", "auto"))


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.openai()


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    """The package, whose import takes seconds: no worker spends them but the one that needs it."""
    import anthropic

    return anthropic


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> str:
    """A model that starts at once, for tests that end its server."""
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path))


@pytest.fixture(scope="session")
def quick(tiny: str) -> Iterator[ServerProcess]:
    """Two places for running requests, and as many as one likes may wait."""
    yield from _running(ServerProcess.tiny(tiny, "--max-num-seqs", "2"))


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A small encoder, whose embeddings mean nothing."""
    folder = write_tiny_encoder(tmp_path_factory.mktemp("encoder"), "BertModel")
    yield from _running(ServerProcess.tiny(str(folder)))


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A small encoder with one class, behind keys and in order of priority."""
    folder = tmp_path_factory.mktemp("reranker")
    labels = {"id2label": {"0": "fits"}}
    write_tiny_encoder(folder, "BertForSequenceClassification", **labels)
    (folder / "keys.txt").write_text(KEYS)
    access = ["--api-keys-file", str(folder / "keys.txt"), "--scheduling-policy", "priority"]
    yield from _running(ServerProcess.tiny(str(folder), *access))


@pytest.fixture(scope="session")
def strict(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With keys, and with room for one request that runs and two that wait."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(KEYS)
    limits = ["--max-num-seqs", "1", "--max-queued-requests", "2", "--max-queued-tokens", "200"]
    limits += ["--max-queue-seconds", "30", "--max-body-bytes", "100kB"]
    access = ["--api-keys-file", str(keys), "--allowed-origin", "https://app.example"]
    yield from _running(ServerProcess.tiny(tiny, *limits, *access))


@pytest.fixture(scope="session")
def thinking(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path
) -> Iterator[ServerProcess]:
    """A model that thinks, or would if its weights were not random."""
    folder = write_thinking_model(tmp_path_factory.mktemp("thinking"), smollm2_path)
    yield from _running(ServerProcess.tiny(str(folder)))


@pytest.fixture(scope="session")
def guarded(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Reached by other names, by ten connections at once, and with a template of one's own."""
    names = ["--allowed-host", "gpu.lan", "--allowed-host", ".corp.example"]
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    more = ["--max-connections", "10", "--chat-template", str(template)]
    yield from _running(ServerProcess.tiny(tiny, *names, *more))


def _running(server: ServerProcess) -> Iterator[ServerProcess]:
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log
