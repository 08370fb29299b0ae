"""An engine's end of a connection to the cache's server."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.framing import frame, pack
from quire.kv.tiers.remote.client import ClientError
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.wire import Wire
from quire.kv.tiers.shared.exchange import Exchange
from quire.kv.tiers.shared.protocol import (
    COUNT,
    MOST_FRAME_BYTES,
    REFUSED,
    WELCOME,
    Operation,
    Shape,
)


class Channel:
    """One call at a time. It is open when it has been greeted."""

    exchange: Exchange

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wire = Wire(self._sock)
        self.is_idle = self._wire.is_idle

    def open(self, path: Path, shape: Shape, deadline: Deadline) -> Channel:
        try:
            self._sock.settimeout(deadline.left())
            self._sock.connect(str(path))
            self.exchange = self._greet(shape, deadline)
        except BaseException:
            self.close()
            raise
        return self

    def hang_up(self) -> None:
        """Let what another thread waits for fail."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def call(self, operation: Operation, body: bytes, deadline: Deadline) -> bytes:
        self._wire.send([frame(bytes([operation]) + body)], deadline)
        return self._wire.frame(deadline, MOST_FRAME_BYTES)

    def flags(
        self, operation: Operation, body: bytes, count: int, deadline: Deadline
    ) -> list[bool]:
        """The answer to a call that is answered by a byte for each of `count` blocks."""
        answer = self.call(operation, body, deadline)
        if len(answer) != count or answer.strip(b"\0\1"):
            raise ClientError("the server's answer is not a flag for each block")
        return [bool(flag) for flag in answer]

    def count(self, operation: Operation, body: bytes, deadline: Deadline) -> int:
        """The answer to a call that is answered by a number."""
        answer = self.call(operation, body, deadline)
        if len(answer) != COUNT.size:
            raise ClientError("the server's answer is not a number")
        return int(COUNT.unpack(answer)[0])

    def json(self, operation: Operation, deadline: Deadline) -> dict[str, Any]:
        """The answer to a call without arguments."""
        answer = self.call(operation, b"", deadline)
        try:
            found: dict[str, Any] = json.loads(answer)
        except ValueError:
            raise ClientError("the server's answer is no JSON") from None
        return found

    def close(self) -> None:
        self._sock.close()

    def _greet(self, shape: Shape, deadline: Deadline) -> Exchange:
        self._wire.send([pack(shape.hello())], deadline)
        self._sock.settimeout(deadline.left())
        answer, files, _, _ = socket.recv_fds(self._sock, 1, 1)
        if answer == REFUSED:
            raise ClientError(self._wire.frame(deadline, MOST_FRAME_BYTES).decode(errors="replace"))
        if answer != WELCOME or not files:
            raise ClientError("what answers is not a server of Quire's cache")
        try:
            return Exchange(files[0], shape)
        finally:
            os.close(files[0])
