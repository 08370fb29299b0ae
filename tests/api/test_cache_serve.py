"""`quire cache serve` as a command: what it says, and what it refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from quire.api.cli import main
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.shared.channel import Channel
from quire.kv.tiers.shared.protocol import Operation, Shape


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "set --ssd-cache-bytes"),
        (["--ssd-cache-bytes", "much"], "--ssd-cache-bytes must be a size in bytes"),
        (["--ssd-cache-bytes", "1GiB", "--host-cache-bytes", "900TiB"], "that are free; lower it"),
        (["--ssd-cache-bytes", "1GiB", "--socket", "x" * 120], "cannot be a socket"),
        (["--ssd-cache-bytes", "1GiB", "--socket", "/proc/none/socket"], "cannot be a socket"),
        (["--ssd-cache-bytes", "1GiB", "--socket", "linked"], "cannot be a socket"),
        (["--ssd-cache-bytes", "1GiB", "--model", "x"], "There is no flag --model"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked.lock").symlink_to("elsewhere")  # its lock is no file of its own
    assert main(["cache", "serve", str(tmp_path), *flags]) == 2
    assert says in capsys.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # nor blocked since


def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire", "cache", "serve", str(tmp_path / "kv")]
    process = subprocess.Popen(
        [*command, "--ssd-cache-bytes", "1MiB"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    socket = tmp_path / "kv" / "quire-kv.sock"
    assert process.stderr.readline() == f"serving at quire://{socket}\n"
    client = Channel().open(socket, Shape(16, (5_000,)), Deadline(PATIENCE_S))
    told = client.json(Operation.STATS, Deadline(PATIENCE_S))
    assert told["connections"] == 1 and told["ssd"]["slots"] > 0
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in mapped  # it is a small process, and quick to come back
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert not client.is_idle() and not socket.exists()
    client.close()
