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

from quire.kv.tiers.ssd.engine import Ended, Engine, Lane, Transfer

_preadv, _pwritev, _pwrite = os.preadv, os.pwritev, os.pwrite


class OneByOne(Engine):
    """Makes a transfer when it is started."""

    name = "one by one"
    depth = 1

    def lane(self) -> Lane:
        return _Blocking()

    def close(self) -> None:
        return


class _Blocking(Lane):
    def start(self, transfer: Transfer) -> None:
        move = os.pwritev if transfer.is_write else os.preadv
        try:
            self._ended = transfer, move(transfer.fd, transfer.buffers, transfer.offset)
        except OSError as error:
            self._ended = transfer, -(error.errno or errno.EIO)

    def wait(self) -> list[Ended]:
        return [self._ended]


class FaultyDisk:
    """Stands before os.preadv, os.pwritev and os.pwrite; harmless until a fault is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder  # files elsewhere are left alone
        self.read_error = 0
        self.write_error = 0
        self.index_error = 0
        self.short_by = 0  # bytes that a read or a write of data falls short by
        self.stop_after: int | None = None  # what is written after so many bytes never arrives
        self.written = 0
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "pwritev", self.pwritev)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

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

    def _put(self, fd: int, packed: bytes, offset: int) -> None:
        """What arrives of it, through a descriptor that takes any number of bytes."""
        room = len(packed) if self.stop_after is None else max(0, self.stop_after - self.written)
        self.written += len(packed)
        if part := packed[:room]:
            plain = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
            _pwrite(plain, part, offset)
            os.close(plain)

    def _is_ours(self, fd: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.folder))
        except OSError:
            return False
