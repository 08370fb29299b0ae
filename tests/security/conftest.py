"""Servers that the tests of known vulnerabilities share: one without keys, one with two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess
from tiny_model import write_tiny_model

KEYS = ["sk-one", "sk-two"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path))


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: str) -> Iterator[ServerProcess]:
    """With drafts, and a journal that a page would show."""
    yield from _running(ServerProcess.tiny(tiny_folder, "--speculative", "ngram"))


@pytest.fixture(scope="session")
def keyed_server(
    tiny_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("\n".join(KEYS))
    yield from _running(ServerProcess.tiny(tiny_folder, "--api-keys-file", str(file)))


def _running(server: ServerProcess) -> Iterator[ServerProcess]:
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log
