"""The example outside the engine works, through a disk and through a Redis server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from redis_server import RedisServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_store.py"


@pytest.mark.parametrize("through", ["disk", "redis"])
def test_two_processes_share_blocks(tmp_path: Path, through: str) -> None:
    if through == "disk":
        said = run(str(tmp_path / "kv"))
        assert "found in {'ssd'}" in said
    else:
        server = RedisServer(tmp_path)
        try:
            said = run(server.url)
        finally:
            server.kill()
        assert "found in {'remote'}" in said
    assert "10 loaded, 10 of them byte for byte what was put" in said
    assert "0 blocks for another tenant" in said


def test_without_a_place_it_says_how_to_use_it() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 1 and "redis://" in done.stderr


def run(place: str) -> str:
    command = [sys.executable, str(EXAMPLE), place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
