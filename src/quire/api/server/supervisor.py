"""With several replicas: a small process that holds the address, and starts the server again.

    supervisor ── the listening socket, a pipe ──► server ──► engines

When a server is killed, or fails by a bug, its streams are lost. Its engines end by themselves; the
supervisor waits for that, and starts another server. New connections wait meanwhile, because the
supervisor keeps the address. A server that was told to end, or reports that it cannot go on, is not
started again. If the supervisor is killed, the server sees the pipe close,
and ends as on SIGTERM.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from types import FrameType

from quire.api.server.settings import ServerConfig
from quire.config import EngineConfig

log = logging.getLogger("quire.server")

UNFORESEEN = 70  # the exit status of a server that failed by a bug
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STEADY_S = 60.0
MOST_FAILURES = 5  # in a row
PAUSE_S = 0.5
ENGINES_S = 60.0  # for the engines of a server that is gone to write their blocks, and end
KILLED_S = 5.0
POLL_S = 0.02
STDERR = 2
PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    def __init__(
        self,
        settings: ServerConfig,
        engine: EngineConfig,
        listener: socket.socket,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._listener = listener
        self._server: subprocess.Popen[str] | None = None
        self._is_told = False  # that the server shall end
        self._had_terminal = os.isatty(STDERR)

    def run(self) -> int:
        """Start servers until one ends for good; returns its exit status."""
        _adopt_orphans()
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        num_failures = 0
        while True:
            started = time.monotonic()
            status = self._serve()
            if self._is_told:
                return max(0, status)
            if status >= 0 and status != UNFORESEEN:
                return status
            num_failures = num_failures + 1 if time.monotonic() - started < STEADY_S else 1
            if num_failures == MOST_FAILURES:
                print("error: The server ends again and again; see its log.", file=sys.stderr)
                return 1
            log.warning("The server has ended (%d); it is started again.", status)
            self._pause(PAUSE_S * (2 ** (num_failures - 1) - 1))
            if self._is_told:
                return 0

    def _serve(self) -> int:
        """Start a server and wait for its end, and for that of all its processes."""
        number = self._listener.fileno()
        server = self._server = subprocess.Popen(
            [sys.executable, "-m", "quire.api.server.supervised", str(number)],
            pass_fds=[number],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            start_new_session=True,  # Ctrl-C reaches the supervisor, which passes it on once
        )
        assert server.stdin is not None
        what = {"settings": asdict(self._settings), "engine": asdict(self._engine)}
        try:
            server.stdin.write(json.dumps(what) + "\n")
            server.stdin.flush()
        except BrokenPipeError:
            pass  # the exit status says why
        if self._is_told:
            server.terminate()  # the signal came before there was a server
        status = _wait_for(server)
        server.stdin.close()
        self._wait_for_engines(server.pid)
        return status

    def _wait_for_engines(self, group: int) -> None:
        """Engines end when their server is gone; one that does not is killed."""
        deadline = time.monotonic() + ENGINES_S
        while _is_there(group):
            late = time.monotonic() - deadline
            if late > KILLED_S:
                return  # stuck in a system call; another server may still find room
            if late > 0:
                os.killpg(group, signal.SIGKILL)
            time.sleep(POLL_S)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._is_told:
            time.sleep(POLL_S)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self._had_terminal and not os.isatty(STDERR):
            number = signal.SIGTERM  # the terminal was closed
        self._is_told = self._is_told or number != signal.SIGHUP
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(number)


def _adopt_orphans() -> None:
    """Engines whose server is gone become this process's children, where the system is Linux.

    Otherwise no process might reap them: many containers have no init that does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait_for(server: subprocess.Popen[str]) -> int:
    """The server's exit status; orphans that end meanwhile, a killed replica's say, are reaped."""
    while server.returncode is None:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:  # a signal's handler has looked, and reaped the server itself
            return server.wait()
        if pid == server.pid:
            server.returncode = os.waitstatus_to_exitcode(status)
    return server.returncode


def _is_there(group: int) -> bool:
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
