"""Questions from the scheduler's process to its workers: over a Unix socket that only they open.

The scheduler waits for the answer, so a worker answers from what it knows at once; that a far tier
is still being asked is an answer, too.

    question: a frame of JSON | a frame of the request's tokens, or an empty one
    answer:   a frame of JSON
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from quire.framing import frame, pack, read_frame_from

log = logging.getLogger("quire")

ANSWER_S = 5.0  # then the worker counts as having nothing

Message = dict[str, Any]


def socket_path(engine_id: str, rank: int) -> Path:
    """Where a worker of an engine answers; short, since a socket's path has to be."""
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"quire-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it, or set TMPDIR.")
    return folder / str(rank)


class LookupServer:
    """A worker's side: a thread for each connection, of which there is one."""

    def __init__(self, path: Path, answer: Callable[[Message, bytes], Message]) -> None:
        self._path = path
        self._answer = answer
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._accept, name="quire look-ups", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            serve = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            serve.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as questions:
            while True:
                try:
                    question = json.loads(read_frame_from(questions))
                    tokens = read_frame_from(questions)
                    connection.sendall(pack(self._answer(question, tokens)))
                except (EOFError, OSError):
                    return
                except Exception:
                    log.exception("A look-up failed.")
                    return

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)


class LookupClient:
    """The scheduler's side: asks one worker, and connects again if that broke."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._answers: IO[bytes] | None = None

    def ask(self, question: Message, tokens: bytes = b"") -> Message | None:
        """Its answer; None where there is none in time."""
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None and self._answers is not None
            self._socket.sendall(pack(question) + frame(tokens))
            answer: Message = json.loads(read_frame_from(self._answers))
            return answer
        except (EOFError, OSError) as error:
            log.warning("A worker did not answer a look-up: %s", error)
            self.close()
            return None

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(str(self._path))
        self._answers = self._socket.makefile("rb")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._answers = None
