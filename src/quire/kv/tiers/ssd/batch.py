"""The blocks of one call on their way: which pieces are still under way, and what failed."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from quire.kv.image import header_bytes
from quire.kv.tiers.ssd.files import page_aligned
from quire.kv.tiers.ssd.geometry import Geometry, whole_pages
from quire.kv.tiers.ssd.io_engine import Transfer
from quire.kv.tiers.ssd.volume import Volume

SHORT = -1  # stands where an errno would: fewer bytes moved than should have
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Batch:
    """Image buffers, and for each a page-aligned buffer for its header."""

    def __init__(
        self, geometry: Geometry, images: Sequence[memoryview], sizes: Sequence[int]
    ) -> None:
        """`sizes`: of the images, in bytes; the buffers are whole pages, and may be longer."""
        self.images = images
        self.sizes = sizes
        self.errors = [0] * len(images)
        self._geometry = geometry
        self._pieces_left = [0] * len(images)
        self._heads = page_aligned(len(images) * geometry.head_bytes)

    def head_pages(self, block: int) -> memoryview:
        size = self._geometry.head_bytes
        return self._heads[block * size : (block + 1) * size]

    def head(self, block: int) -> memoryview:
        """The header without the bytes that fill its last page."""
        return self.head_pages(block)[: header_bytes(self._geometry.block_size)]

    def image(self, block: int) -> memoryview:
        """The image without the bytes that fill its last page."""
        return self.images[block][: self.sizes[block]]

    def transfers(
        self, block: int, volume: Volume, slot: int, *, is_write: bool
    ) -> Iterator[Transfer]:
        """The pieces of a block, all of which are expected to end."""
        pages = self.images[block][: whole_pages(self.sizes[block])]
        buffers = self.head_pages(block), pages
        pieces = list(volume.transfers(slot, *buffers, is_write, block))
        self._pieces_left[block] = len(pieces)
        yield from pieces

    def ends_block(self, transfer: Transfer, result: int) -> bool:
        """Note what became of a piece; true for the last one of its block."""
        block = transfer.block
        if result != transfer.size:
            self.errors[block] = -result if result < 0 else SHORT
        self._pieces_left[block] -= 1
        return not self._pieces_left[block]
