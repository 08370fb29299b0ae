"""One cache folder that is open: its slots, the records that say what they hold, its health."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.kv.tiers.ssd.files import bytes_on_disk, lock_folder, open_direct, open_private
from quire.kv.tiers.ssd.geometry import DATA_FILE, INDEX_FILE, Geometry
from quire.kv.tiers.ssd.index_file import IndexFile
from quire.kv.tiers.ssd.io_engine import Transfer, pieces

logger = logging.getLogger(__name__)

ERRORS_IN_A_ROW = 4  # one may be a bad spot on the disk; this many are a disk that has gone


@dataclass
class Volume:
    """The files of a folder, locked for this process."""

    folder: Path
    geometry: Geometry
    lock_fd: int
    data_fd: int
    index: IndexFile
    is_direct: bool = False
    slots: int = 0
    has_failed: bool = False
    _errors: int = 0

    @classmethod
    def open(cls, folder: Path, geometry: Geometry, *, create: bool) -> Volume:
        """Lock the folder and open its files as they are."""
        opened: list[int] = []
        try:
            if create:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.append(lock_folder(folder))
            opened.append(open_private(folder / INDEX_FILE, create=create))
            opened.append(open_private(folder / DATA_FILE, create=create))
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        lock_fd, index_fd, data_fd = opened
        return cls(folder, geometry, lock_fd, data_fd, IndexFile(index_fd))

    def go_direct(self) -> None:
        """Past the page cache from now on, if the disk lets its first slot be read that way."""
        direct = open_direct(self.folder / DATA_FILE)
        if direct is not None:
            os.close(self.data_fd)
            self.data_fd, self.is_direct = direct, True

    def transfers(
        self, slot: int, head: memoryview, image: memoryview, is_write: bool, block: int
    ) -> Iterator[Transfer]:
        """Header and image of one slot, between the disk and these buffers."""
        offset = slot * self.geometry.slot_bytes
        return pieces(self.data_fd, offset, [head, image], is_write, block)

    def slots_on_disk(self) -> int:
        return os.fstat(self.data_fd).st_size // self.geometry.slot_bytes

    def bytes_on_disk(self) -> int:
        return bytes_on_disk(self.data_fd) + bytes_on_disk(self.index.fd)

    def went_well(self) -> None:
        self._errors = 0

    def went_wrong(self) -> None:
        """An I/O error; after a few in a row the folder is left alone until the next start."""
        self._errors += 1
        if self._errors >= ERRORS_IN_A_ROW and not self.has_failed:
            self.has_failed = True
            logger.error("%s fails to read or write and is not used any more", self.folder)

    def close(self) -> None:
        for fd in (self.data_fd, self.index.fd, self.lock_fd):  # the lock last
            os.close(fd)
