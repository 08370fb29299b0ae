"""An event loop in a thread of its own, which code of any other loop or thread may use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from quire.errors import QuireError

T = TypeVar("T")


class LoopThread:
    """What is started before `finish` runs before the coroutine that `finish` is given."""

    def __init__(self, closed: str) -> None:
        """`closed` is the message of the error for what comes after `finish`."""
        self._closed = closed
        self._lock = threading.Lock()  # held only to schedule
        self._is_finishing = False
        started: Future[asyncio.AbstractEventLoop] = Future()
        # A daemon: a program that ends without closing does not wait for it.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name="quire-async", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    async def _run(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        self._finished = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._finished.wait()  # then `asyncio.run` cancels what has not ended

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run the coroutine that `make` gives; QuireError after `finish`."""
        with self._lock:
            if self._is_finishing:
                raise QuireError(self._closed)
            return asyncio.run_coroutine_threadsafe(make(), self._loop)

    def finish(self, make: Callable[[], Coroutine[Any, Any, None]]) -> threading.Thread:
        """Run a last coroutine and end; the thread is returned, to be waited for."""

        async def last() -> None:
            try:
                await make()
            finally:
                self._finished.set()

        with self._lock:
            if not self._is_finishing:
                self._is_finishing = True
                asyncio.run_coroutine_threadsafe(last(), self._loop)
        return self._thread
