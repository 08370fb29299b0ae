"""The engine's end of a channel to the process that runs Mooncake's client."""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

from quire.framing import pack
from quire.kv.tiers.remote.client import Value, ValueShape
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.wire import Wire

_PAGE = 4096


class Channel:
    """One call at a time; the values of a call are in memory that both processes see."""

    def __init__(self, shape: ValueShape) -> None:
        self._stride = -(-shape.value_bytes // _PAGE) * _PAGE
        self._memory_fd = os.memfd_create("quire-channel")
        os.ftruncate(self._memory_fd, shape.batch * self._stride)
        self._memory = mmap.mmap(self._memory_fd, shape.batch * self._stride)
        self._sock, self._far_end = socket.socketpair()
        self._wire = Wire(self._sock)
        self.is_idle = self._wire.is_idle

    def hand_over(self, control: socket.socket) -> None:
        """The other end goes to the process at the end of `control`, and is no longer ours."""
        try:
            socket.send_fds(control, [b"L"], [self._far_end.fileno(), self._memory_fd])
        finally:
            self._far_end.close()
            os.close(self._memory_fd)

    def call(
        self, do: str, keys: list[str], deadline: Deadline, sizes: Sequence[int] = ()
    ) -> list[int]:
        """`sizes`: of the values that are moved, in bytes."""
        request = {"do": do, "keys": keys, "sizes": list(sizes), "stride": self._stride}
        self._wire.send([pack(request)], deadline)
        codes: list[int] = self.receive(deadline)
        return codes

    def receive(self, deadline: Deadline) -> Any:
        return receive(self._wire, deadline)

    def put_in(self, at: int, value: Value) -> None:
        start, middle, end = self._place(at, value)
        self._memory[start:middle] = value.head
        self._memory[middle:end] = value.image

    def take_out(self, at: int, value: Value) -> None:
        start, middle, end = self._place(at, value)
        with memoryview(self._memory) as memory:
            value.head[:] = memory[start:middle]
            value.image[:] = memory[middle:end]

    def close(self) -> None:
        self._sock.close()
        self._memory.close()

    def _place(self, at: int, value: Value) -> tuple[int, int, int]:
        start = at * self._stride
        return start, start + len(value.head), start + len(value)


def receive(wire: Wire, deadline: Deadline) -> Any:
    """The next message."""
    return json.loads(wire.frame(deadline))
