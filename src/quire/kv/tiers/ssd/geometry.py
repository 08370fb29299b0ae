"""Which bytes of which file are which block's; two files make a cache folder.

    quire-kv.data     slot 0 | slot 1 | …                  slot = header pages | image, whole pages
    quire-kv.index    first page | record 0 | record 1 …   what each slot holds (`records`)

A slot starts and ends on a page, so one vectored direct read or write moves header and image. The
first page of the index says what the slots are made for; a folder made for other images is
replaced.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from quire.kv.image import LAYOUT_VERSION, header_bytes
from quire.kv.tiers.tier import PAGE

DATA_FILE = "quire-kv.data"
INDEX_FILE = "quire-kv.index"
LOCK_FILE = "quire-kv.lock"
OWN_FILES = (DATA_FILE, INDEX_FILE, LOCK_FILE)

RECORD_BYTES = 128
MAGIC = b"quireIX\x01"
_FIRST_PAGE = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")

# The file system's own books count as disk space too: an extent for each slot at the worst, in
# tree nodes of a page.
_EXTENT_BYTES = 32
_SPARE_PAGES = 8


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class Geometry:
    """The shape of a slot, which is all that follows from the images it is for."""

    image_bytes: int
    block_size: int
    layout_version: int = LAYOUT_VERSION

    @property
    def head_bytes(self) -> int:
        return whole_pages(header_bytes(self.block_size))

    @property
    def slot_bytes(self) -> int:
        return self.head_bytes + whole_pages(self.image_bytes)

    def index_bytes(self, slots: int) -> int:
        return whole_pages(PAGE + slots * RECORD_BYTES)

    def quota_for(self, slots: int) -> int:
        """What both files take with as many slots, the file system's own books included."""
        each = self.slot_bytes + RECORD_BYTES + _EXTENT_BYTES
        return slots * each + _SPARE_PAGES * PAGE

    def slots_within(self, quota: int) -> int:
        """How many slots there may be in `quota` bytes."""
        return max(0, (quota - self.quota_for(0)) // (self.quota_for(1) - self.quota_for(0)))

    def first_page(self) -> bytes:
        fields = (MAGIC, self.layout_version, self.block_size, self.image_bytes)
        packed = _FIRST_PAGE.pack(*fields)
        checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))
        return (packed + checksum).ljust(PAGE, b"\0")

    @classmethod
    def of_first_page(cls, page: bytes) -> Geometry | None:
        """What a folder was made for; None if the page is not whole."""
        if len(page) < PAGE:
            return None
        magic, layout_version, block_size, image_bytes = _FIRST_PAGE.unpack_from(page)
        found = cls(image_bytes, block_size, layout_version)
        return found if magic == MAGIC and found.first_page() == page else None
