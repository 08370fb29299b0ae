"""A disk that fails as it is told to: every read and write of the folder under test goes past it.

Data goes through an engine that makes one transfer after the other, so that "after byte k" means
the same in every run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.kv.tiers.ssd.io_engine import Ended, IoEngine, IoQueue, Transfer

_preadv, _pwritev, _pwrite, _ftruncate = os.preadv, os.pwritev, os.pwrite, os.ftruncate


class OneByOne(IoEngine):
    """Makes a transfer when it is started."""

    name = "one by one"
    depth = 1

    def queue(self) -> IoQueue:
        return _Blocking()

    def close(self) -> None:
        return


class _Blocking(IoQueue):
    def start(self, transfer: Transfer) -> None:
        move = os.pwritev if transfer.is_write else os.preadv
        try:
            self._ended = transfer, move(transfer.fd, transfer.buffers, transfer.offset)
        except OSError as error:
            self._ended = transfer, -(error.errno or errno.EIO)

    def wait(self) -> list[Ended]:
        return [self._ended]


class FaultyDisk:
    """Stands before the functions of `os` that the tier uses; harmless until a fault is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder  # files elsewhere are left alone
        self.read_error = 0
        self.write_error = 0
        self.index_error = 0
        self.short_by = 0  # bytes that a read or a write of data falls short by
        self.stop_after: int | None = None  # what is written after so many bytes never arrives
        self.written = 0
        self.edges: list[int] = []  # how much was written after each write
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "pwritev", self.pwritev)
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "ftruncate", self.ftruncate)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._is_ours(fd) and self.read_error:
            raise OSError(self.read_error, "injected")
        count = _preadv(fd, buffers, offset)
        return count - self.short_by if self._is_ours(fd) else count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self._is_ours(fd):
            return _pwritev(fd, buffers, offset)
        if self.write_error:
            raise OSError(self.write_error, "injected")
        joined = b"".join(buffers)
        self._put(fd, joined[: len(joined) - self.short_by], offset)
        return len(joined) - self.short_by

    def pwrite(self, fd: int, packed: bytes, offset: int) -> int:
        if not self._is_ours(fd):
            return _pwrite(fd, packed, offset)
        if self.index_error:
            raise OSError(self.index_error, "injected")
        self._put(fd, packed, offset)
        return len(packed)

    def forget(self, stop_after: int | None) -> None:
        """Count anew."""
        self.written, self.edges, self.stop_after = 0, [], stop_after

    def stops(self, step: int) -> list[int]:
        """Where to stop a second time: here and there, and around the edges of every write."""
        around = {edge + by for edge in self.edges for by in (-100, -1, 0, 1)}
        return sorted(stop for stop in {*around, *range(0, self.written, step)} if stop >= 0)

    def ftruncate(self, fd: int, size: int) -> None:
        if self.stop_after is None or self.written < self.stop_after or not self._is_ours(fd):
            _ftruncate(fd, size)

    def _put(self, fd: int, packed: bytes, offset: int) -> None:
        """What arrives of it, through a descriptor that takes any number of bytes."""
        room = len(packed) if self.stop_after is None else max(0, self.stop_after - self.written)
        self.written += len(packed)
        self.edges.append(self.written)
        if part := packed[:room]:
            plain = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
            _pwrite(plain, part, offset)
            os.close(plain)

    def _is_ours(self, fd: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.folder))
        except OSError:
            return False
