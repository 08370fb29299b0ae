"""The process of another rank, as rank 0 sees it: two sockets to it, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from quire.ranks.wire import pack

ASKING_S = 0.1
REASON_S = 2.0  # for the reason of a failure to become known
LOST_ITS_PEERS = 3  # the exit status of a rank that only followed another into its end


class Follower:
    """Started at once; it has inherited its ends of the sockets, and the two files."""

    def __init__(self, rank: int, meeting: int, memory: int) -> None:
        self.rank = rank
        self.orders, far_orders = socket.socketpair()
        self.copies, far_copies = socket.socketpair()
        fds = [far_orders.fileno(), far_copies.fileno(), meeting, memory]
        with far_orders, far_copies:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.ranks", *map(str, fds)],
                pass_fds=fds,
                env=_environment(),
                stdin=subprocess.DEVNULL,
            )
        self.sending = threading.Lock()  # of copies, by several threads
        self.said: dict[str, Any] = {}  # the last value of each kind of news

    def ask_where(self) -> None:
        """What it is doing it says among its news; nothing here waits for one that is stuck."""
        if self.sending.acquire(timeout=ASKING_S):
            with suppress(OSError):
                self.copies.send(pack({"do": "where"}), socket.MSG_DONTWAIT)
            self.sending.release()

    def how_it_ended(self) -> str:
        """As the end of a sentence that begins with its name."""
        try:
            status = self.process.wait(REASON_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def end(self, timeout: float) -> None:
        """Let it end by itself, or not."""
        for sock in (self.orders, self.copies):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment() -> dict[str, str]:
    """What this process has, its path, and OpenMP threads that leave room for others."""
    path = os.pathsep.join(filter(None, sys.path))
    return {"GOMP_SPINCOUNT": "1000", **os.environ, "PYTHONPATH": path}
