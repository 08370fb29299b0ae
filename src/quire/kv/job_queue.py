"""Queues of transfer jobs with their threads, and the handles by which callers follow transfers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from quire.errors import EngineFailed

log = logging.getLogger("quire")

Job = Callable[[], None]


class Handle:
    """A transfer under way. It ends exactly once, also when it fails."""

    def __init__(self) -> None:
        self.cancelled = False
        self._over = threading.Event()
        self._ends = threading.Lock()  # taken by whoever ends it, and never given back
        self._on_end: list[Job] = []

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over; False if it is not by then."""
        return self._over.wait(timeout)

    def cancel(self) -> None:
        """Begin nothing more for it. What has begun goes on to its end: `wait` for that."""
        self.cancelled = True

    def call_at_end(self, tell: Job) -> None:
        """Call it before the transfer begins: one that has ended calls nothing any more."""
        self._on_end.append(tell)

    def end(self) -> None:
        if not self._ends.acquire(blocking=False):
            return  # the store was closed while a thread was still busy with it
        self._over.set()
        for tell in self._on_end:
            tell()


class OpenHandles:
    """All handles under way, and an event that is set whenever one of them ends.

    Jobs refer to their handles, and these to this: so the `owner` lives while something is under
    way, though nobody else refers to it any more.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = owner
        self._open: set[Handle] = set()
        self._all_ended = False
        self._lock = threading.Lock()
        self._ended_event = threading.Event()

    def follow(self, handle: Handle) -> None:
        """Call it before the transfer begins: a handle that has ended would stay for ever."""
        handle.call_at_end(lambda: self._ended(handle))
        with self._lock:
            self._open.add(handle)
            comes_too_late = self._all_ended
        if comes_too_late:
            _give_up(handle)

    def end_all(self) -> None:
        """End all that is under way, and from now on whatever is to be followed."""
        with self._lock:
            self._all_ended = True
            given_up = list(self._open)
        for handle in given_up:
            _give_up(handle)

    def _ended(self, handle: Handle) -> None:
        with self._lock:
            self._open.discard(handle)
        self._ended_event.set()

    def wait_for_any(self, timeout: float) -> None:
        """Wait until a handle has ended since the last call."""
        if self._ended_event.wait(timeout):
            self._ended_event.clear()

    def of(self, *kinds: type[Handle]) -> list[Handle]:
        """Those of these kinds, or all."""
        with self._lock:
            return [handle for handle in self._open if isinstance(handle, kinds or Handle)]

    def wait_for_all(self, timeout: float, *kinds: type[Handle]) -> bool:
        """Wait until all handles (of these kinds) have ended; False if some have not by then."""
        deadline = time.monotonic() + timeout
        while waiting := self.of(*kinds):
            if not waiting[0].wait(deadline - time.monotonic()):
                return False
        return True


def _give_up(handle: Handle) -> None:
    handle.cancel()
    handle.end()


class JobQueue:
    """Jobs that its threads do in the order in which they were submitted."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_closed = self._drops_jobs = False
        self._threads = [
            threading.Thread(target=self._work, name=f"quire {name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def backlog(self) -> int:
        return self._jobs.qsize()

    def submit(self, job: Job) -> None:
        """After `close` it is not done any more."""
        self._jobs.put(job)

    def catch_up(self, timeout: float) -> bool:
        """Wait until all that was submitted before is done (a queue of one thread)."""
        if self._is_closed:
            return not self._is_working()
        reached = threading.Event()
        self.submit(reached.set)
        return reached.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Do what was submitted and stop; False if that takes longer: then the rest is dropped."""
        self._is_closed = True
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._drops_jobs = True
        return not self._is_working()

    def _is_working(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._drops_jobs:
                _do(job)
            del job  # else what it refers to lives on until there is another


def _do(job: Job) -> None:
    try:
        job()
    except EngineFailed as error:  # the engine reports it, too
        log.debug("A cache transfer was given up: %s", error)
    except Exception:  # a bug in one job must not end the thread that does the others
        log.exception("A cache transfer failed.")
