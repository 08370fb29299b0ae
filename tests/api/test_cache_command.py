"""`quire cache` from the command line."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE, chain, filled
from tier_harness import flip

from quire.api import cli
from quire.kv.tiers.ssd.geometry import DATA_FILE, Geometry
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import PAGE

IMAGE_BYTES = 9_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quota = Geometry(IMAGE_BYTES, BLOCK_SIZE).quota_for(20)
    tier = SsdTier([tmp_path / "kv"], quota, IMAGE_BYTES, BLOCK_SIZE)
    tier.write(chain(5), filled(5, IMAGE_BYTES))
    tier.close()
    return tmp_path / "kv"


def test_stat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "stat", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "5 of 20 (44 KiB)" in told and "16 tokens, 9 KiB, layout 1" in told
    assert "seconds ago" in told and "5 blocks, 44 KiB" in told
    assert cli.main(["cache", "stat", str(folder), str(folder), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["blocks"] for line in lines] == [5, 5]


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "verify", str(folder)]) == 0
    assert "5 blocks are whole; none dropped" in capsys.readouterr().out
    flip(folder / DATA_FILE, PAGE + 1)
    assert cli.main(["cache", "verify", str(folder)]) == 1
    assert "4 blocks are whole; 1 corrupt dropped" in capsys.readouterr().out
    assert cli.main(["cache", "verify", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"] == 4


def test_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "clear", str(folder)]) == 0
    assert "freed" in capsys.readouterr().out
    assert cli.main(["cache", "clear", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {folder} is not a cache folder;") and told.count("\n") == 1


def test_clear_takes_what_a_server_left(folder: Path) -> None:
    lock = folder / "quire-kv.sock.lock"
    lock.touch()
    (folder / "mine.txt").touch()
    assert cli.main(["cache", "clear", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_clear_leaves_the_lock_of_a_server_that_listens(folder: Path) -> None:
    lock = folder / "quire-kv.sock.lock"
    with open(lock, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cli.main(["cache", "clear", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == [lock.name]


@pytest.mark.parametrize(
    "flags", [["--prompt", "other"], ["--tokens", "1", "2"], ["--cache-salt", "a"]]
)
def test_everything_and_a_prefix_is_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server is asked for anything."""
    monkeypatch.setattr("urllib.request.urlopen", None)
    assert cli.main(["cache", "delete", "--everything", *flags]) == 2
    told = capsys.readouterr().err
    assert "--everything" in told and told.startswith("error: ") and told.count("\n") == 1


@pytest.mark.parametrize("line", [["cache"], ["cache", "stat"], ["cache", "stats", "x"]])
def test_what_is_missing_is_said(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 2
    assert "--help" in capsys.readouterr().err
