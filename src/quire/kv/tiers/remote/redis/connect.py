"""How a connection to a Redis server comes about: redis-py knows addresses, TLS and passwords."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.connection import Connection

from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.redis.link import Link, Refusal, command
from quire.kv.tiers.remote.wire import Wire

Place = tuple[str, int]  # host and port of a cluster's node

_TICK_S = 0.05


class Dialler:
    """Opens connections, one at a time; `timeout` is for all of one but looking up the name."""

    def __init__(self, settings: dict[str, Any], timeout: float) -> None:
        self._timeout = timeout
        self._settings = settings | {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "protocol": 2,  # in which the server never sends what was not asked for
        }
        self._kind = self._settings.pop("connection_class", Connection)
        self._closed = False

    def dial(self, place: Place | None = None) -> Link:
        """A link that has been greeted and answers; in a cluster, to the node at `place`."""
        settings = dict(self._settings)
        if place is not None:
            settings["host"], settings["port"] = place
        connection = self._kind(**settings)
        try:
            with self._bounded(connection):
                connection.connect()
                link = Link(Wire(connection._sock), connection.disconnect)
                _try_out(link, Deadline(self._timeout))
        except Exception as error:
            connection.disconnect()
            if isinstance(error, redis.TimeoutError):
                raise TimeoutError(str(error)) from None
            raise
        return link

    def host(self, place: Place | None) -> str:
        return place[0] if place else self._settings.get("host", "localhost")

    def close(self) -> None:
        """Let the greeting that is under way fail."""
        self._closed = True

    @contextmanager
    def _bounded(self, connection: Any) -> Iterator[None]:
        """redis-py waits for each byte of a greeting anew, so a second thread has the clock."""
        done, end = threading.Event(), time.monotonic() + self._timeout

        def watch() -> None:
            while not done.wait(_TICK_S):
                if self._closed or time.monotonic() > end:
                    _hang_up(connection)

        watcher = threading.Thread(target=watch, name="quire-remote-dial", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _hang_up(connection: Any) -> None:
    """Shut it down: a read from it finds its end."""
    if connection._sock is not None:
        with suppress(OSError):
            connection._sock.shutdown(socket.SHUT_RDWR)


def _try_out(link: Link, deadline: Deadline) -> None:
    """Ask what will be asked later: a server may greet and yet be loading, or not allow it."""
    link.send([command("STRLEN", "quire:probe")], deadline)
    reply = link.reply(deadline)
    if isinstance(reply, Refusal) and not reply.has_moved:
        raise reply
