"""When to stop asking, and when to ask again.

    closed ── failures in a row ──► open ── backoff is over ──► half-open ── a probe fails ──► open
       ▲                                                            │
       └──────────────────────── a probe succeeds ──────────────────┘

Calls are counted by their kind: a store that answers questions and never delivers has failed. The
backoff doubles each time, up to a cap. A probe that succeeds leaves it as it is, and one failure of
the kind that opened the breaker opens it again; only a success of that kind makes it short. So a
store that greets but does not serve is asked less and less.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Shared by threads. `clock` is for tests."""

    def __init__(
        self,
        limit: int = 3,  # failures in a row that open it
        backoff: float = 0.5,  # seconds, the first time
        cap: float = 30.0,
        state: State = State.CLOSED,  # OPEN: nothing is known yet, a probe may start at once
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.times_opened = 0
        self._limit, self._backoff, self._cap, self._clock = limit, backoff, cap, clock
        self._failures: Counter[str] = Counter()  # in a row, by kind of call
        self._cause: str | None = None  # the kind that opened it; None if no call did
        self._next_backoff = backoff
        self._retry_at = 0.0
        self._lock = threading.Lock()

    def succeeded(self, kind: str) -> None:
        with self._lock:
            if self.state is State.CLOSED:  # else a call that began before it opened
                self._failures[kind] = 0
                if self._cause in (None, kind):
                    self._next_backoff = self._backoff

    def failed(self, kind: str) -> bool:
        """Whether this was the failure that opened it."""
        with self._lock:
            self._failures[kind] += 1
            opens = self.state is State.CLOSED and self._failures[kind] >= self._limit
            if opens:
                self._cause = kind
                self._open()
            return opens

    def trip(self) -> bool:
        """Open it without counting; whether it was closed."""
        with self._lock:
            opens = self.state is State.CLOSED
            if opens:
                self._cause = None
                self._open()
            return opens

    def start_probe(self) -> bool:
        """Whether this caller makes the trial call; it then reports the result."""
        with self._lock:
            if self.state is not State.OPEN or self._clock() < self._retry_at:
                return False
            self.state = State.HALF_OPEN
            return True

    def end_probe(self, success: bool) -> None:
        with self._lock:
            if success:
                self.state = State.CLOSED
                self._failures.clear()
                if self._cause is not None:
                    self._failures[self._cause] = self._limit - 1
            else:
                self._open()

    def allows(self) -> bool:
        """For those whose calls are the probes: whether to make one, and then `report` on it."""
        return self.state is State.CLOSED or self.start_probe()

    def report(self, success: bool) -> None:
        if self.state is State.HALF_OPEN:
            self.end_probe(success)
        elif success:
            self.succeeded("")
        else:
            self.failed("")

    def seconds_to_probe(self) -> float | None:
        """How long until a probe may start; None when there is none to wait for."""
        with self._lock:
            if self.state is not State.OPEN:
                return None
            return max(0.0, self._retry_at - self._clock())

    def _open(self) -> None:
        self.state = State.OPEN
        self.times_opened += 1
        # Replicas that lost one server together should not all come back in the same instant.
        self._retry_at = self._clock() + self._next_backoff * random.uniform(0.8, 1.0)
        self._next_backoff = min(2 * self._next_backoff, self._cap)
