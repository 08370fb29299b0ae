"""Moves bytes between files and memory, many transfers at a time.

An I/O engine draws transfers from an iterator and keeps up to `depth` of them under way. The thread
that calls it runs the iterator and `done` (checksums, records) in the meantime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from quire.kv.tiers.tier import PAGE

PIECE_BYTES = 1 << 20  # a block is cut into pieces of about this size, which disks like best


@dataclass(slots=True, eq=False)
class Transfer:
    """One vectored read or write at a place in a file; `block` is whatever the caller calls it."""

    fd: int
    offset: int
    buffers: list[memoryview]
    is_write: bool
    block: int

    @property
    def size(self) -> int:
        return sum(map(len, self.buffers))


Ended = tuple[Transfer, int]  # the bytes that moved, or a negative errno
Done = Callable[[Transfer, int], None]


class IoQueue(ABC):
    """One thread's submissions to an I/O engine. A disk's error is a result, never an exception."""

    @abstractmethod
    def start(self, transfer: Transfer) -> None:
        """Begin; file and buffers stay as they are until the transfer has ended."""

    @abstractmethod
    def wait(self) -> list[Ended]:
        """What has ended since the last call: one at least."""


class IoEngine(ABC):
    """A way to do disk I/O: io_uring, or threads. Several threads may call `run` at once."""

    name: str
    depth: int

    @abstractmethod
    def queue(self) -> IoQueue:
        """The calling thread's own queue."""

    @abstractmethod
    def close(self) -> None:
        """No call is under way."""

    def run(self, transfers: Iterable[Transfer], done: Done) -> None:
        """Make all transfers, in no certain order, and call `done` for each with its result."""
        queue, waiting = self.queue(), iter(transfers)
        under_way = 0
        ended: list[Ended] = []
        try:
            while True:
                # First give the disk its next work, then attend to what it has brought.
                while under_way < self.depth and (transfer := next(waiting, None)) is not None:
                    queue.start(transfer)
                    under_way += 1
                for transfer, result in ended:
                    done(transfer, result)
                if not under_way:
                    return
                ended = queue.wait()
                under_way -= len(ended)
        finally:
            while under_way:  # an exception: the buffers are not ours to give back before this
                under_way -= len(queue.wait())


def pieces(
    fd: int, offset: int, buffers: Iterable[memoryview], is_write: bool, block: int
) -> Iterator[Transfer]:
    """Buffers that follow each other in a file, as transfers of about the same size."""
    rest = list(buffers)
    total = sum(map(len, rest))
    count = -(-total // PIECE_BYTES)
    pages = -(-total // (PAGE * max(count, 1)))
    while rest:
        taken = list(_take(rest, pages * PAGE))
        transfer = Transfer(fd, offset, taken, is_write, block)
        offset += transfer.size
        yield transfer


def _take(rest: list[memoryview], size: int) -> Iterator[memoryview]:
    """The first `size` bytes, which are taken off `rest`."""
    while rest and size:
        part = rest.pop(0)
        if len(part) > size:
            rest.insert(0, part[size:])
            part = part[:size]
        size -= len(part)
        yield part
