"""One connection, on the server's side."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any, Protocol

from quire.errors import QuireError
from quire.framing import encode_json, frame, read_frame_from
from quire.kv.tiers.remote.client import ClientError
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.wire import Wire
from quire.kv.tiers.shared.cache import SharedCache
from quire.kv.tiers.shared.exchange import Exchange, make_file
from quire.kv.tiers.shared.protocol import (
    COUNT,
    MOST_FRAME_BYTES,
    REFUSED,
    WELCOME,
    Operation,
    ProtocolError,
    Shape,
    unpack_keys,
    unpack_pin,
    unpack_roots,
)

HELLO_S = 10.0  # a client that connects and says nothing takes a place from others
MOST_HELLO_BYTES = 1 << 16


class Server(Protocol):
    def cache_for(self, shape: Shape) -> SharedCache: ...

    def stats(self) -> dict[str, Any]: ...


class Session:
    """Nothing that a client sends, or leaves unsent, does more than to end its own session."""

    def __init__(self, sock: socket.socket, server: Server) -> None:
        self._sock, self._server = sock, server
        self._requests = sock.makefile("rb")

    def run(self) -> None:
        """Serve one request after the other until the client leaves."""
        try:
            shape = Shape.of_hello(self._hello())
            cache = self._server.cache_for(shape)
        except QuireError as error:
            self.refuse(str(error))
            raise
        exchange = self._welcome(shape)
        self._sock.settimeout(None)
        while True:
            request = memoryview(self._frame(MOST_FRAME_BYTES))
            self._sock.sendall(frame(self._answer(request, shape, cache, exchange)))

    def refuse(self, reason: str) -> None:
        with suppress(OSError):
            self._sock.sendall(REFUSED + frame(reason.encode()))
        self.close()

    def hang_up(self) -> None:
        """End the session, from another thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._requests.close()
        self._sock.close()

    def _welcome(self, shape: Shape) -> Exchange:
        file = make_file(shape)
        try:
            socket.send_fds(self._sock, [WELCOME], [file])
            return Exchange(file, shape)
        finally:
            os.close(file)

    def _answer(
        self, request: memoryview, shape: Shape, cache: SharedCache, exchange: Exchange
    ) -> bytes:
        if not request:
            raise ProtocolError("a client sent an empty request")
        operation, body = request[0], request[1:]
        match operation:
            case Operation.ASK:
                return bytes(cache.contains(unpack_keys(body)))
            case Operation.READ:
                return bytes(cache.read(shape.unpack(body), exchange))
            case Operation.WRITE:
                return bytes(cache.write(shape.unpack(body), exchange))
            case Operation.USE:
                cache.use(unpack_keys(body))
            case Operation.CHECK:
                cache.check(unpack_keys(body))
            case Operation.STATS:
                return encode_json(self._server.stats()).encode()
            case Operation.PIN:
                seconds, keys = unpack_pin(body)
                return COUNT.pack(cache.pin(keys, seconds))
            case Operation.DELETE:
                return COUNT.pack(cache.delete(unpack_keys(body)))
            case Operation.DELETE_ROOTS:
                tenant, roots = unpack_roots(body)
                return COUNT.pack(cache.delete_roots(roots, tenant))
            case Operation.LIST:
                return encode_json(cache.blocks_by_root()).encode()
            case _:
                raise ProtocolError(f"a client asked for operation {operation}, which there is not")
        return b""

    def _hello(self) -> Any:
        """All of it in time: one that comes byte by byte takes a place from others, too."""
        try:
            return json.loads(Wire(self._sock).frame(Deadline(HELLO_S), MOST_HELLO_BYTES))
        except ClientError as error:
            raise ProtocolError(f"a client sends too much ({error})") from None
        except (ValueError, RecursionError):
            raise ProtocolError("a client's hello is no JSON") from None

    def _frame(self, most: int) -> bytes:
        try:
            return read_frame_from(self._requests, most)
        except ValueError as error:
            raise ProtocolError(f"a client sends too much ({error})") from None
