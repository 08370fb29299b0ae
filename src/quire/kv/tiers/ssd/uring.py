"""Transfers by Linux's io_uring, spoken to directly: three mapped rings and two system calls.

A thread puts an entry into the submission ring and calls `io_uring_enter`; the kernel puts one into
the completion ring when the transfer has ended. Each thread has a ring of its own, set up so that
the kernel touches the rings only inside that thread's own calls (`DEFER_TASKRUN`, Linux 6.1). So
no memory barriers are needed, which Python does not have. Where the kernel is older, completions
may be written at any time: that is safe only on processors that keep loads in order.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
import threading
import weakref
from typing import Any

import numpy as np

from quire.kv.tiers.ssd.io_engine import Ended, IoEngine, IoQueue, Transfer

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13
_GETEVENTS = 1
_SINGLE_MMAP = 1  # a feature of Linux 5.4
_READV, _WRITEV = 1, 2
_SQES_OFFSET = 0x10000000
_ENTRY = struct.Struct("=BBHiQQIIQ24x")  # opcode … fd, offset, address, length, flags, user data
_COMPLETION = struct.Struct("=QiI")
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EBUSY)

syscall = ctypes.CDLL(None, use_errno=True).syscall
syscall.argtypes = [ctypes.c_long] * 7
syscall.restype = ctypes.c_long


class _Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("sq_entries", "cq_entries", "flags")),
        ("of_a_polling_thread", ctypes.c_uint32 * 2),
        ("features", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 4),
        ("sq", ctypes.c_uint32 * 10),  # offsets: head, tail, mask, entries, flags, dropped, array
        ("cq", ctypes.c_uint32 * 10),  # offsets: head, tail, mask, entries, overflow, cqes
    ]


class UringEngine(IoEngine):
    """Raises OSError where the kernel has no io_uring, or none that is safe here."""

    name = "io_uring"
    depth = 16

    def __init__(self) -> None:
        self._threads = threading.local()
        self._rings: weakref.WeakSet[_Ring] = weakref.WeakSet()
        self.queue()

    def queue(self) -> IoQueue:
        ring: _Ring | None = getattr(self._threads, "ring", None)
        if ring is None:
            ring = self._threads.ring = _Ring(self.depth)
            self._rings.add(ring)
        return ring

    def close(self) -> None:
        for ring in list(self._rings):
            ring.close()


class _Ring(IoQueue):
    def __init__(self, entries: int) -> None:
        fd, params = _set_up(entries)
        # The descriptor goes with the thread that it belongs to, or with the engine.
        self.close = weakref.finalize(self, os.close, fd)
        # But not at the end of the process, which closes it: the thread may still be writing, and
        # another file may have got the number by then.
        self.close.atexit = False
        self._fd = fd
        self._to_submit = self._number = 0
        self._under_way: dict[int, tuple[Transfer, Any]] = {}
        size = max(params.sq[6] + 4 * params.sq_entries, params.cq[5] + 16 * params.cq_entries)
        self._bytes = memoryview(_map(fd, size, 0))
        self._words = self._bytes[: size // 4 * 4].cast("I")
        self._sqes = memoryview(_map(fd, _ENTRY.size * params.sq_entries, _SQES_OFFSET))
        self._sq_tail, self._array = params.sq[1] // 4, params.sq[6] // 4
        self._cq_head, self._cq_tail = params.cq[0] // 4, params.cq[1] // 4
        self._cqes = params.cq[5]
        self._sq_mask, self._cq_mask = params.sq_entries - 1, params.cq_entries - 1

    def start(self, transfer: Transfer) -> None:
        vector = _io_vector(transfer.buffers)
        self._number += 1
        self._under_way[self._number] = transfer, vector
        operation = _WRITEV if transfer.is_write else _READV
        tail = self._words[self._sq_tail]
        at = tail & self._sq_mask
        _ENTRY.pack_into(
            *(self._sqes, at * _ENTRY.size, operation, 0, 0, transfer.fd, transfer.offset),
            *(vector.ctypes.data, len(transfer.buffers), 0, self._number),
        )
        self._words[self._array + at] = at
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF
        self._to_submit += 1
        self._enter(0)

    def wait(self) -> list[Ended]:
        while not (ended := self._reap()):
            self._enter(1)
        return ended

    def _enter(self, least: int) -> None:
        """Hand over what is in the submission ring, and wait until `least` have ended.

        What the kernel does not take now stays in the ring for the next call.
        """
        count = syscall(_ENTER, self._fd, self._to_submit, least, _GETEVENTS, 0, 0)
        if count >= 0:
            self._to_submit -= count
        elif (code := ctypes.get_errno()) not in _AGAIN:
            raise OSError(code, os.strerror(code))

    def _reap(self) -> list[Ended]:
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        ended = []
        while head != tail:
            at = self._cqes + (head & self._cq_mask) * _COMPLETION.size
            number, result, _ = _COMPLETION.unpack_from(self._bytes, at)
            transfer, _ = self._under_way.pop(number)
            ended.append((transfer, result))
            head = (head + 1) & 0xFFFFFFFF
        self._words[self._cq_head] = head
        return ended


def _set_up(entries: int) -> tuple[int, _Params]:
    keeps_loads_in_order = platform.machine() == "x86_64"
    for flags in [_SINGLE_ISSUER | _DEFER_TASKRUN] + [0] * keeps_loads_in_order:
        params = _Params(flags=flags)
        if sys.platform != "linux":  # the numbers of the calls mean something else there
            break
        fd = syscall(_SETUP, entries, ctypes.addressof(params), 0, 0, 0, 0)
        if fd >= 0 and params.features & _SINGLE_MMAP:
            return fd, params
        if fd >= 0:
            os.close(fd)
    code = ctypes.get_errno() or errno.ENOSYS
    raise OSError(code, os.strerror(code))


def _map(fd: int, size: int, offset: int) -> mmap.mmap:
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)


def _io_vector(buffers: list[memoryview]) -> Any:
    """Addresses and lengths as readv(2) takes them; arrays, since read-only memory has them too."""
    views = (np.frombuffer(buffer, np.uint8) for buffer in buffers)
    rows = [(view.__array_interface__["data"][0], view.nbytes) for view in views]
    return np.array(rows, np.uint64)
