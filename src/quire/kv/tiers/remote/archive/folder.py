"""Packs as files of a folder that several machines mount.

Nothing is locked: a file is written aside and renamed, so a name is either a whole file or none,
and of two writers of one name either may win, for both files are whole. A file's time of
modification is when it was last used.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from quire.kv.tiers.remote.archive.objects import Bytes, Listed, Objects, StoreFull
from quire.kv.tiers.remote.archive.pack import Span

_ASIDE = ".aside-"
_FORGOTTEN_S = 3600.0  # a file that lies aside for longer has lost its writer
# A folder whose time of modification is no older than this when it is listed may change again
# without a new time: the clocks of machines differ, and those of file systems are coarse.
_UNSETTLED_S = 10.0
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Folder(Objects):
    """`mount` must be there: were it created, it might lie below a mount that is not there."""

    keeps_uses = True

    def __init__(self, mount: Path, version: int) -> None:
        self._mount, self._top = mount, mount / f"quire-{version}"
        self._seen: dict[str, tuple[int, list[str]]] = {}  # by folder: its time, what it has

    def check(self) -> None:
        if not self._mount.is_dir():
            raise FileNotFoundError(f"{self._mount} is no folder; mount or create it")
        self._top.mkdir(exist_ok=True)

    def names(self) -> Iterator[str]:
        seen, self._seen = self._seen, {}
        for folder in self._folders():
            with suppress(FileNotFoundError):  # swept in the meantime
                changed = os.stat(folder.path).st_mtime_ns
                if folder.name not in seen or seen[folder.name][0] != changed:
                    files = [entry.name for entry in os.scandir(folder.path)]
                    packs = [f"{folder.name}/{name}" for name in files if name[0] != "."]
                    settled = changed < time.time_ns() - _UNSETTLED_S * 1e9
                    seen[folder.name] = (changed if settled else 0, packs)
                self._seen[folder.name] = seen[folder.name]
                yield from seen[folder.name][1]

    def listed(self) -> Iterator[Listed]:
        for folder in self._folders():
            with suppress(FileNotFoundError):
                for entry in os.scandir(folder.path):
                    if not entry.name.startswith("."):
                        with suppress(FileNotFoundError):
                            name = f"{folder.name}/{entry.name}"
                            yield Listed(name, entry.stat().st_mtime)

    def read(self, name: str, spans: Sequence[Span]) -> Iterator[Bytes]:
        fd = os.open(self._top / name, os.O_RDONLY)
        try:
            for start, size in spans:
                yield _read(fd, start, size)
        finally:
            os.close(fd)

    def write(self, name: str, data: Bytes, wanted: Callable[[], bool] = lambda: True) -> None:
        path = self._top / name
        aside = path.with_name(f"{_ASIDE}{uuid.uuid4().hex}")
        try:
            fd = _create(aside)
            try:
                _write_all(fd, data)
            finally:
                os.close(fd)  # a network's file system may say only here that there was no room
            if wanted():
                os.replace(aside, path)
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFull(*error.args) from None
            raise
        finally:
            with suppress(OSError):
                os.unlink(aside)

    def delete(self, name: str) -> None:
        path = self._top / name
        with suppress(FileNotFoundError):
            path.unlink()
        with suppress(OSError):  # not empty, most of the time
            path.parent.rmdir()

    def touch(self, name: str, until: float) -> None:
        with suppress(FileNotFoundError):
            path = self._top / name
            if os.stat(path).st_mtime < until:
                os.utime(path, (until, until))

    def use_alike(self, name: str, other: str) -> None:
        with suppress(FileNotFoundError):
            self.touch(name, os.stat(self._top / other).st_mtime)

    def tidy(self) -> None:
        old = time.time() - _FORGOTTEN_S
        for folder in self._folders():
            with suppress(FileNotFoundError):
                for entry in os.scandir(folder.path):
                    if entry.name.startswith(_ASIDE):
                        with suppress(FileNotFoundError):
                            if entry.stat().st_mtime < old:
                                os.unlink(entry.path)

    def _folders(self) -> list[os.DirEntry[str]]:
        return [entry for entry in os.scandir(self._top) if entry.is_dir()]


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        return os.open(path, flags, 0o600)


def _read(fd: int, start: int, size: int) -> memoryview:
    data = np.empty(size, np.uint8).data  # no zeros are written first
    got = 0
    while got < size and (count := os.preadv(fd, [data[got:]], start + got)):
        got += count
    return data[:got]


def _write_all(fd: int, data: Bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
