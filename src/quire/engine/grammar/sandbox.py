"""The engine's side of the process in which forms are tried before it compiles them itself."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from quire.engine.grammar.source import cannot_be_used
from quire.errors import QuireError
from quire.structured import StructuredOutput

POLL_S = 0.05  # how soon it is seen that a form is not wanted any more
START_S = 120.0
ANSWER_S = 60.0  # the process has limits of its own, which are narrower
CHUNK = 1 << 16

Answer = dict[str, Any]


class SandboxFailed(QuireError):
    """The process is gone, or does not answer."""


@dataclass(frozen=True)
class Verdict:
    """What a form that was tried is compiled from, or why it cannot be."""

    grammar: str = ""
    num_bytes: int = 0  # that it took
    error: str | None = None


class Sandbox:
    """For one thread; only `close` is for others."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._unread = b""
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, vocabulary: Mapping[str, Any]) -> None:
        """Begin to; `try_form` waits for it. `vocabulary` is what `Vocabulary.to_plain` gives."""
        with self._lock:
            if self._is_closed:
                raise SandboxFailed("The engine ends.")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.grammar.sandbox_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a form that runs out of memory says so there
                start_new_session=True,  # a group of its own: for `_kill`, not for a Ctrl-C
            )
        self._unread, self._is_ready = b"", False
        self._send(vocabulary)

    def try_form(self, form: StructuredOutput, is_wanted: Callable[[], bool]) -> Verdict | None:
        """None if it was no longer wanted."""
        if not self._is_ready:
            self._receive(START_S)
            self._is_ready = True
        self._send(form.as_dict())
        answer = self._receive(ANSWER_S, is_wanted)
        if not is_wanted():
            return None
        if (died := answer.get("died")) is not None:
            return Verdict(error=str(cannot_be_used(form, died)))
        error = answer.get("error")
        return Verdict(answer.get("grammar", ""), answer.get("num_bytes", 0), error)

    def close(self) -> None:
        """End the process, from whichever thread; the one that reads from it tidies up."""
        with self._lock:
            self._is_closed = True
            self._kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _receive(self, timeout: float, is_wanted: Callable[[], bool] | None = None) -> Answer:
        assert self._process is not None and self._process.stdout is not None
        pipe, deadline = self._process.stdout, time.monotonic() + timeout
        try:
            while b"\n" not in self._unread:
                if _is_readable(pipe):
                    self._unread += _read(pipe)
                elif time.monotonic() > deadline:
                    raise OSError("it does not answer")
                elif is_wanted is not None and not is_wanted():
                    os.kill(self._process.pid, signal.SIGUSR1)  # the answer comes all the same
        except OSError as error:
            raise self._failed(error) from None
        line, _, self._unread = self._unread.partition(b"\n")
        answer: Answer = json.loads(line)
        return answer

    def _failed(self, error: OSError) -> SandboxFailed:
        self.end()
        return SandboxFailed(f"The process that tries forms has ended ({error}).")

    def end(self) -> None:
        """For the thread that asks it; the next form starts another process."""
        with self._lock:
            self._kill()
            process, self._process = self._process, None
        if process is not None:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what it was not able to read
                    assert pipe is not None
                    pipe.close()

    def _kill(self) -> None:
        """With its fork: they are a group. The number is its own until `end` has waited for it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _is_readable(pipe: IO[bytes]) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * POLL_S))


def _read(pipe: IO[bytes]) -> bytes:
    data = os.read(pipe.fileno(), CHUNK)
    if not data:
        raise OSError("its output is closed")
    return data
