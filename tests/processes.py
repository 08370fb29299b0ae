"""Processes of other programs: killed, paused, and signals that have arrived."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from patience import eventually


class Killable:
    """A server in a process of its own, which `start` of its class sets."""

    process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def pause(self) -> None:
        """It accepts connections, as the system does for it, and says nothing."""
        assert self.process is not None
        stop(self.process)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Each of its threads stands still when this returns: a busy one may run on for a while."""
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: set(_states(process.pid)) == {"T"}, "the process does not stop")


def _states(pid: int) -> list[str]:
    """One letter for each thread, as the system sees it."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return [thread.read_text().rpartition(") ")[2][0] for thread in threads]
