"""Clients that other people wrote, against `quire serve` of the demo model.

They live in an environment of their own (`make test-clients`), in which there is no Quire:
QUIRE_PYTHON is the interpreter that has it. Elsewhere these tests are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PYTHON = os.environ.get("QUIRE_PYTHON")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of OpenAI's API."""
    from server_process import ServerProcess

    source = Path(__file__).parents[2] / "src"
    server = ServerProcess("--dtype", "auto", python=PYTHON, env={"PYTHONPATH": str(source)})
    yield f"{server.url}/v1"
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.fixture(autouse=True)
def _in_its_own_place(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where clients look for a server and a key, and for a home that is not the user's."""
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
