"""The engine's end of the socket: it never waits for the other process to read or to write."""

from __future__ import annotations

import select
import socket

from quire.engine.process.messages import LinkClosed, Message
from quire.framing import FrameReader, pack

CHUNK = 1 << 18


class Link:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._frames = FrameReader()
        self._unsent = memoryview(b"")
        self._poll = select.poll()

    def receive(self, timeout: float | None) -> list[Message]:
        """What has come, waiting for it at most `timeout` seconds; also sends what is unsent."""
        wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        seen = self._wait(wanted, timeout)
        if seen & select.POLLOUT:
            self._push()
        return self._read() if seen & ~select.POLLOUT else []

    def _wait(self, wanted: int, timeout: float | None) -> int:
        self._poll.register(self._socket, wanted)
        seen = self._poll.poll(None if timeout is None else 1000 * timeout)
        return seen[0][1] if seen else 0

    def _read(self) -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise LinkClosed(f"the server's socket broke: {error}") from None
            if not data:
                raise LinkClosed("the server has closed its socket")
            messages += self._frames.feed(data)

    @property
    def is_free(self) -> bool:
        """Whether everything given to `send` is with the system, so that more may follow."""
        return not self._unsent

    def send(self, message: Message) -> None:
        """Begin to send a message; only when `is_free`."""
        assert not self._unsent, "a message is still on its way"
        self._unsent = memoryview(pack(message))
        self._push()

    def finish(self, timeout: float) -> None:
        """Wait until the last message is sent."""
        while self._unsent:
            if not self._wait(select.POLLOUT, timeout):
                return
            self._push()

    def _push(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkClosed(f"the server's socket broke: {error}") from None
