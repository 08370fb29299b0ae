"""The index of a folder: the records of its slots in a file of their own.

It is read once, in pieces, and then written a record at a time with plain writes. A mapping of the
file would spare the calls, but there an I/O error or a full disk is a signal that ends the process.
"""

from __future__ import annotations

import errno
import os
import struct

import numpy as np

from quire.kv.image import BlockName
from quire.kv.tiers.ssd.geometry import RECORD_BYTES
from quire.kv.tiers.ssd.records import RECORD, USED_OFFSET, Held, make_record
from quire.kv.tiers.tier import PAGE

_EMPTY = bytes(RECORD_BYTES)
_AT_ONCE = 8192  # records: a mebibyte, which stays in the cache while it is checked
_USED = struct.Struct("<Q")


class IndexFile:
    """Set, cleared and stamped slot by slot; each write is within a disk's sector, or raises."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self) -> Held:
        """All records that are whole."""
        size = max(0, os.fstat(self.fd).st_size - PAGE)
        parts = []
        for start in range(0, -(-size // RECORD_BYTES), _AT_ONCE):
            packed = os.pread(self.fd, _AT_ONCE * RECORD_BYTES, _at(start))
            missing = -len(packed) % RECORD_BYTES  # of a last one that was cut in two: it is torn
            parts.append(Held.among(start, np.frombuffer(packed + bytes(missing), RECORD)))
        return Held.joined(parts)

    def put(self, slot: int, name: BlockName, used: int) -> None:
        record = make_record(name.key, name.parent, name.root, used, name.tenant)
        self._write(record, _at(slot))

    def clear(self, slot: int) -> None:
        self._write(_EMPTY, _at(slot))

    def stamp(self, slot: int, used: int) -> None:
        self._write(_USED.pack(used), _at(slot) + USED_OFFSET)

    def move(self, source: int, target: int) -> None:
        self._write(os.pread(self.fd, RECORD_BYTES, _at(source)), _at(target))
        self.clear(source)

    def _write(self, packed: bytes, offset: int) -> None:
        if os.pwrite(self.fd, packed, offset) != len(packed):
            raise OSError(errno.EIO, "a record was written in part")


def _at(slot: int) -> int:
    return PAGE + slot * RECORD_BYTES
