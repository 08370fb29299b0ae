"""Files that only their owner can read, that one engine holds at a time, and that have their room.

Every error of the system comes out as an OSError; `open_folder.py` makes sentences of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from pathlib import Path

from quire.errors import ConfigError
from quire.kv.tiers.ssd.geometry import LOCK_FILE
from quire.kv.tiers.tier import PAGE

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW  # a link could lead to another user's file
RESERVE_STEP = 1 << 30  # bytes
_LOCK_SECONDS = 0.3  # a process that inspects the folder may hold the lock for a moment
_DIRECT = getattr(os, "O_DIRECT", None)  # Linux
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)


def page_aligned(size: int) -> memoryview:
    """Memory of its own for direct I/O: zeroed, on page boundaries."""
    return memoryview(mmap.mmap(-1, max(size, 1)))


def lock_folder(folder: Path) -> int:
    """Hold the folder until the file is closed, which the end of the process does as well."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        lock = os.open(folder / LOCK_FILE, _FLAGS | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still_there(lock, folder / LOCK_FILE):
                return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise ConfigError(
                    f"{folder} is in use by a running engine; stop that one or use another folder."
                ) from None
            time.sleep(_LOCK_SECONDS / 10)
        except OSError:
            os.close(lock)
            raise
        os.close(lock)


def is_still_there(lock: int, path: Path) -> bool:
    """`quire cache clear` removes the file, which another process may just be opening."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False


def open_private(path: Path, *, create: bool) -> int:
    fd = os.open(path, _FLAGS | (os.O_CREAT if create else 0), 0o600)
    os.fchmod(fd, 0o600)  # it may have been copied here by hand
    return fd


def open_direct(path: Path) -> int | None:
    """The file past the page cache, where its file system can do that with whole pages."""
    if _DIRECT is None:
        return None
    try:
        fd = os.open(path, _FLAGS | _DIRECT)
    except OSError:
        return None
    try:
        if os.preadv(fd, [page_aligned(PAGE)], 0) == PAGE:  # some refuse only when it is used
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def reserve(fd: int, size: int, *, may_be_sparse: bool) -> int:
    """Make the file `size` bytes long, with the disk's room behind them; returns its length.

    A disk that has less leaves it shorter. It grows in steps, and a step that fails is taken back,
    so that a cache that is too large for its disk does not fill it to the last page. Where room
    cannot be reserved, it is found, or not, when the file is written: by zeros, now, if it must
    not be sparse.
    """
    reached = os.fstat(fd).st_size
    if reached > size:
        os.ftruncate(fd, size)
        reached = size
    # From the start: a crash, or a copy made by a tool, can have left holes.
    for start in range(0, size, RESERVE_STEP):
        end = min(size, start + RESERVE_STEP)
        try:
            allocate(fd, start, end)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                if not may_be_sparse:
                    _write_zeros(fd, reached, size)
                os.ftruncate(fd, size)
                return size
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.ftruncate(fd, max(start, reached))
            return max(start, reached)
    return size


def allocate(fd: int, start: int, end: int) -> None:
    """fallocate(2) itself: where it is missing, posix_fallocate would write to every page."""
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(fd, 0, ctypes.c_int64(start), ctypes.c_int64(end - start)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _write_zeros(fd: int, start: int, end: int) -> None:
    while start < end:
        start += os.pwrite(fd, bytes(min(end - start, 1 << 20)), start)


def bytes_on_disk(fd: int) -> int:
    """The larger of what the file holds and what it says it holds: a quota is hard."""
    status = os.fstat(fd)
    return max(status.st_size, 512 * status.st_blocks)
