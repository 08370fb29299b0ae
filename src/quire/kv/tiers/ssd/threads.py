"""Transfers by threads that block: for every system that has no io_uring, or forbids it."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from quire.kv.tiers.ssd.io_engine import Ended, IoEngine, IoQueue, Transfer


class ThreadEngine(IoEngine):
    """One pool of threads, as many as a disk wants transfers at a time."""

    name = "threads"
    depth = 8

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.depth, thread_name_prefix="quire-ssd")

    def queue(self) -> IoQueue:
        return _PoolQueue(self._pool)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class _PoolQueue(IoQueue):
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._ended: SimpleQueue[Ended] = SimpleQueue()

    def start(self, transfer: Transfer) -> None:
        self._pool.submit(self._move, transfer)

    def wait(self) -> list[Ended]:
        return [self._ended.get()]

    def _move(self, transfer: Transfer) -> None:
        result = -errno.EIO  # `wait` must not wait for ever, whatever goes wrong
        try:
            move = os.pwritev if transfer.is_write else os.preadv
            result = move(transfer.fd, transfer.buffers, transfer.offset)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        finally:
            self._ended.put((transfer, result))
