"""Transfers by threads that block: for every system that has no io_uring, or forbids it."""

from __future__ import annotations

import errno
import os
from functools import partial
from queue import SimpleQueue

from quire.kv.job_queue import JobQueue
from quire.kv.tiers.ssd.io_engine import Ended, IoEngine, IoQueue, Transfer


class ThreadEngine(IoEngine):
    """As many threads as a disk wants transfers at a time.

    They are no ThreadPoolExecutor, which takes nothing any more at the end of the process: that is
    when a store that was not closed writes its last blocks.
    """

    name = "threads"
    depth = 8

    def __init__(self) -> None:
        self._jobs = JobQueue("ssd transfers", self.depth)

    def queue(self) -> IoQueue:
        return _ThreadsQueue(self._jobs)

    def close(self) -> None:
        self._jobs.close(0.0)


class _ThreadsQueue(IoQueue):
    def __init__(self, jobs: JobQueue) -> None:
        self._jobs = jobs
        self._ended: SimpleQueue[Ended] = SimpleQueue()

    def start(self, transfer: Transfer) -> None:
        self._jobs.submit(partial(self._move, transfer))

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
