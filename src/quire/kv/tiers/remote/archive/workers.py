"""Threads for calls that cannot be stopped, such as to a mount whose server is gone.

A caller waits for results until its deadline; a call that takes longer is left to end by itself and
what it brings is not looked at. So no call may touch memory of its caller's. Threads are few: with
all of them left behind, new calls wait for one, up to their deadlines, and none is ever started.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from quire.kv.tiers.remote.deadline import Deadline

T = TypeVar("T")

THREADS = 8


class Results(Generic[T]):
    """Where jobs of one call put what they have."""

    def __init__(self) -> None:
        self.wanted = True
        self._items: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._items.put((item, None))

    def end(self, error: BaseException | None = None) -> None:
        """Of one job; with the reason if it failed."""
        self._items.put((None, error))

    def until(self, jobs: int, deadline: Deadline) -> Iterator[T]:
        """As they come, until so many jobs have ended; the first failure is raised."""
        try:
            while jobs:
                try:
                    item, error = self._items.get(timeout=deadline.left())
                except queue.Empty:
                    raise TimeoutError("the store did not answer in time") from None
                if error is not None:
                    raise error
                if item is None:
                    jobs -= 1
                else:
                    yield item
        finally:
            self.wanted = False


Work = Callable[[Results[T]], None]


class Workers:
    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._work, name="quire-remote-worker", daemon=True).start()

    def run(self, jobs: Sequence[Work[T]], deadline: Deadline) -> Iterator[T]:
        """Do these at once, as far as there are threads."""
        results: Results[T] = Results()
        for job in jobs:
            self._jobs.put(lambda job=job: _do(job, results))  # type: ignore[misc]
        return results.until(len(jobs), deadline)

    def close(self) -> None:
        for _ in range(THREADS):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with suppress(OSError):  # callers that wait are told by their results
                job()


def _do(job: Work[T], results: Results[T]) -> None:
    if not results.wanted:
        return
    try:
        job(results)
    except BaseException as error:
        results.end(error)
    else:
        results.end()
