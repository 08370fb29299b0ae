"""A proxy that does to a connection what networks do to it."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from redis_server import free_port

ABORT = struct.pack("ii", 1, 0)  # to close is then to reset


class Proxy(ABC):
    """Passes bytes between its clients and a server, until told to do harm.

    `mode` holds for connections that are open as well as for new ones:
        pass        do no harm
        black hole  take everything, give nothing
        reset       end every connection with a reset
        trickle     what the server sends arrives byte by byte
        corrupt     one bit of every `corrupt_every` bytes that the server sends is wrong
        cut         after `cut_after` bytes from the server, reset
    """

    def __init__(self) -> None:
        self.mode, self.cut_after, self.corrupt_every = "pass", 0, 4096
        self.trickle_s = 0.02  # a byte
        self.spared: set[int] = set()  # numbers of connections to which nothing is done
        self.hung: set[int] = set()  # and of those that are black holes, whatever the mode
        self.accepted = 0
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.listen()

    @abstractmethod
    def _bind(self) -> socket.socket:
        """Where clients come."""

    @abstractmethod
    def _connect(self) -> socket.socket:
        """To the server."""

    @property
    def is_listening(self) -> bool:
        return self._listener is not None

    def listen(self) -> None:
        self._listener = self._bind()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def vanish(self) -> None:
        """The port is closed, and what was open is reset."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for sock in self._open:
            _reset(sock)
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            number, self.accepted = self.accepted, self.accepted + 1
            try:
                far = self._connect()
            except OSError:  # the server is gone; it may come back
                _reset(near)
                continue
            self._open = [sock for sock in self._open if sock.fileno() >= 0] + [near, far]
            for source, target, is_reply in ((near, far, False), (far, near, True)):
                job = (source, target, is_reply, number)
                threading.Thread(target=self._pump, args=job, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_reply: bool, number: int):
        passed = 0
        with suppress(OSError):
            while True:
                data, files = self._receive(source)
                if not data:
                    break
                mode = "pass" if number in self.spared else self.mode
                mode = "black hole" if number in self.hung else mode
                if files and mode in ("reset", "cut", "black hole"):
                    self._close_files(files)
                    files = []
                if mode == "reset":
                    break
                if mode == "cut" and is_reply and passed + len(data) > self.cut_after:
                    target.sendall(data[: max(0, self.cut_after - passed)])
                    time.sleep(0.05)  # a reset takes with it what has not been read
                    break
                if mode == "black hole":
                    continue
                if files:
                    self._pass_files(target, data, files)
                    continue
                if mode == "trickle" and is_reply:
                    self._trickle(data, target)
                    continue
                if mode == "corrupt" and is_reply:
                    data = bytearray(data)
                    hit = slice(self.corrupt_every // 2, None, self.corrupt_every)
                    data[hit] = bytes(byte ^ 1 for byte in data[hit])
                target.sendall(data)
                passed += len(data)
        _reset(source)
        _reset(target)

    def _receive(self, source: socket.socket) -> tuple[bytes, list[int]]:
        """What came, and the files that came with it."""
        return source.recv(64 << 10), []

    def _pass_files(self, target: socket.socket, data: bytes, files: list[int]) -> None:
        raise AssertionError("files come over Unix sockets only")

    def _close_files(self, files: list[int]) -> None:
        for file in files:
            os.close(file)

    def _trickle(self, data: bytes, target: socket.socket) -> None:
        for at in range(len(data)):
            if self.mode != "trickle":
                target.sendall(data[at:])
                return
            target.sendall(data[at : at + 1])
            time.sleep(self.trickle_s)


class TcpProxy(Proxy):
    """Between `port` and a server's port."""

    def __init__(self, server_port: int) -> None:
        self.port, self._server_port = free_port(), server_port
        super().__init__()

    def _bind(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", self.port))

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server_port))


class UnixProxy(Proxy):
    """Between two socket files; what is passed over them arrives whole."""

    def __init__(self, path: Path, server_path: Path) -> None:
        self.path, self._server_path = path, server_path
        super().__init__()

    def _bind(self) -> socket.socket:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()
        return listener

    def _connect(self) -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        far.connect(str(self._server_path))
        return far

    def _receive(self, source: socket.socket) -> tuple[bytes, list[int]]:
        data, files, _, _ = socket.recv_fds(source, 64 << 10, 4)
        return data, files

    def _pass_files(self, target: socket.socket, data: bytes, files: list[int]) -> None:
        try:
            socket.send_fds(target, [data], files)
        finally:
            self._close_files(files)


def _reset(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
