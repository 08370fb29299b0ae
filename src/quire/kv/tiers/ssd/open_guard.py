"""Lets calls in while a tier is open, and says when the last of them has left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets calls in until it is closed; `close` waits, up to a bound, for those inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_open = True

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Whether the gate is open; if so, it is not passed by `close` before this ends."""
        with self._changed:
            is_open = self._is_open
            self._inside += is_open
        try:
            yield is_open
        finally:
            with self._changed:
                self._inside -= is_open
                self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def close(self, timeout: float) -> bool:
        """Let no call in from now on, and wait; whether all have left in time."""
        with self._changed:
            self._is_open = False
            return self._changed.wait_for(lambda: self._inside == 0, timeout)
