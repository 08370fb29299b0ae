"""A connected socket on which no byte is waited for past a deadline.

A socket's own timeout starts again with every byte, so a peer that sends one byte a second is never
late by it. Here the time that is left is set anew before each call.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable

from quire.framing import read_frame
from quire.kv.tiers.remote.client import ClientError
from quire.kv.tiers.remote.deadline import Deadline

_LOOKAHEAD = 16 << 10  # what a reply's first line may bring along; the rest goes where it belongs
_SMALL = 16 << 10  # parts that are rather copied together than sent one by one


class Wire:
    """Sends from, and receives straight into, the memory of the caller."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ahead = bytearray(_LOOKAHEAD)  # received and not yet read: [_start, _end)
        self._start = self._end = 0

    def send(self, parts: Iterable[bytes | memoryview], deadline: Deadline) -> None:
        small = bytearray()  # not yet sent
        for part in parts:
            if len(part) > _SMALL or len(small) > _SMALL:
                self._send_all(small, deadline)
                small = bytearray()
            if len(part) > _SMALL:
                self._send_all(part, deadline)
            else:
                small += part
        self._send_all(small, deadline)

    def line(self, deadline: Deadline) -> bytes:
        """What comes before the next CRLF."""
        return self.lines(1, deadline)[0]

    def lines(self, count: int, deadline: Deadline) -> list[bytes]:
        lines: list[bytes] = []
        while len(lines) < count:
            last = self._ahead.rfind if count > 1 else self._ahead.find
            end = last(b"\r\n", self._start, self._end)
            if end < 0:
                self._look_ahead(deadline)
                continue
            ready = bytes(self._ahead[self._start : end]).split(b"\r\n")[: count - len(lines)]
            self._start += sum(map(len, ready)) + 2 * len(ready)
            lines += ready
        return lines

    def fill(self, target: memoryview, deadline: Deadline) -> None:
        """The next bytes, as many as `target` holds."""
        ready = min(len(target), self._end - self._start)
        target[:ready] = self._ahead[self._start : self._start + ready]
        self._start += ready
        rest = target[ready:]
        while rest:
            rest = rest[self._receive(rest, deadline) :]

    def frame(self, deadline: Deadline, most: int | None = None) -> bytes:
        """The bytes of the next frame, of which there may be `most`."""

        def read(count: int) -> bytes:
            data = bytearray(count)
            self.fill(memoryview(data), deadline)
            return bytes(data)

        try:
            return read_frame(read, most)
        except ValueError as error:
            raise ClientError(str(error)) from None

    def skip(self, count: int, deadline: Deadline) -> None:
        waste = memoryview(bytearray(min(count, _LOOKAHEAD)))
        while count:
            part = waste[:count]
            self.fill(part, deadline)
            count -= len(part)

    def is_idle(self) -> bool:
        """Whether it is open with nothing to read: a server that went away leaves something."""
        if self._start != self._end:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def _send_all(self, part: bytes | bytearray | memoryview, deadline: Deadline) -> None:
        rest = memoryview(part)
        while rest:
            self._sock.settimeout(deadline.left())
            rest = rest[self._sock.send(rest) :]

    def _look_ahead(self, deadline: Deadline) -> None:
        kept = self._end - self._start
        self._ahead[:kept] = self._ahead[self._start : self._end]
        self._start, self._end = 0, kept
        if kept == len(self._ahead):
            raise ClientError("a reply's first line has no end")
        self._end += self._receive(memoryview(self._ahead)[kept:], deadline)

    def _receive(self, target: memoryview, deadline: Deadline) -> int:
        self._sock.settimeout(deadline.left())
        count = self._sock.recv_into(target)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count
