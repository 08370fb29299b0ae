"""Open connections, lent to one caller at a time; those that fail do not come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from quire.kv.tiers.remote.deadline import Deadline


class Connection(Protocol):
    def is_idle(self) -> bool:
        """Whether it is open, and no answer is awaited."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Pool(Generic[C]):
    """Borrowers never open a connection: to look up a name or to greet may take for ever.

    They take one that is there, or wait until one is given back or another thread fills the pool.
    """

    def __init__(self, size: int, on_loss: Callable[[], None]) -> None:
        self._size = size
        self._on_loss = on_loss
        self._idle: list[C] = []
        self._open = 0  # idle or lent
        self._changed = threading.Condition()
        self._turns = 0  # how often waiting callers were turned away, and why the last time
        self._reason = "the pool is closed"
        self._closed = False

    def missing(self) -> int:
        with self._changed:
            return 0 if self._closed else self._size - self._open

    def fill(self, connect: Callable[[], C]) -> None:
        """Replace what has gone."""
        self._discard(lambda connection: not connection.is_idle())
        while self.missing():
            self._add(connect())

    def turn_away(self, reason: Exception) -> None:
        """Let waiting callers fail: there will be no connection soon."""
        with self._changed:
            self._turns += 1
            self._reason = str(reason)
            self._changed.notify_all()

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[C]:
        connection = self._take(deadline)
        whole = False
        try:
            yield connection
            whole = True
        finally:  # also when a reader stops half-way: then answers arrive that no call waits for
            self._give_back(connection, whole)

    def close(self) -> None:
        with self._changed:
            self._closed = True
        self._discard(lambda connection: True)

    def _take(self, deadline: Deadline) -> C:
        with self._changed:
            turns = self._turns
            while True:
                while self._idle:
                    connection = self._idle.pop()
                    if connection.is_idle():
                        return connection
                    self._drop(connection)
                if self._closed or self._turns != turns:
                    raise ConnectionError(self._reason)
                self._changed.wait(deadline.left())

    def _give_back(self, connection: C, whole: bool) -> None:
        with self._changed:
            if whole and not self._closed:
                self._idle.append(connection)
            else:
                self._drop(connection)
            self._changed.notify()

    def _add(self, connection: C) -> None:
        with self._changed:
            self._open += 1
        self._give_back(connection, whole=True)

    def _discard(self, unwanted: Callable[[C], bool]) -> None:
        with self._changed:
            for connection in list(self._idle):
                if unwanted(connection):
                    self._idle.remove(connection)
                    self._drop(connection)
            self._changed.notify_all()

    def _drop(self, connection: C) -> None:
        self._open -= 1
        connection.close()
        self._on_loss()
