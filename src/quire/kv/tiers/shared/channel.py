"""An engine's end of a connection to the cache's server."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from quire.framing import frame, pack
from quire.kv.tiers.remote.client import ClientError
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.wire import Wire
from quire.kv.tiers.shared.exchange import Exchange
from quire.kv.tiers.shared.protocol import MOST_FRAME_BYTES, Operation, Shape


class Channel:
    """One call at a time."""

    def __init__(self, path: Path, shape: Shape, deadline: Deadline) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wire = Wire(self._sock)
        self.is_idle = self._wire.is_idle
        try:
            self._sock.settimeout(deadline.left())
            self._sock.connect(str(path))
            self.exchange = self._greet(shape, deadline)
        except BaseException:
            self._sock.close()
            raise

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

    def close(self) -> None:
        self._sock.close()

    def _greet(self, shape: Shape, deadline: Deadline) -> Exchange:
        self._wire.send([pack(shape.hello())], deadline)
        try:
            welcome = json.loads(self._wire.frame(deadline, MOST_FRAME_BYTES))
            refusal = welcome["refusal"]
        except (ValueError, TypeError, KeyError):
            raise ClientError("it is not a cache's server of Quire that answers") from None
        if refusal:
            raise ClientError(refusal)
        self._sock.settimeout(deadline.left())
        _, files, _, _ = socket.recv_fds(self._sock, 1, 1)
        if not files:
            raise ClientError("the server sent no memory")
        try:
            return Exchange(files[0], shape)
        finally:
            os.close(files[0])
