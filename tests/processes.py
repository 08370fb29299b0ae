"""Signals to other processes, sent and arrived."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from patience import eventually


def stop(process: subprocess.Popen[bytes]) -> None:
    """Each of its threads stands still when this returns: a busy one may run on for a while."""
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: set(_states(process.pid)) == {"T"}, "the process does not stop")


def _states(pid: int) -> list[str]:
    """One letter for each thread, as the system sees it."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return [thread.read_text().rpartition(") ")[2][0] for thread in threads]
