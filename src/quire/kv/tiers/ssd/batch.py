"""The blocks of one call on their way: which pieces are still under way, and what failed."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from quire.kv.image import BlockName
from quire.kv.tiers.ssd.engine import Transfer
from quire.kv.tiers.ssd.files import page_aligned
from quire.kv.tiers.ssd.volume import Volume

SHORT = -1  # stands where an errno would: fewer bytes moved than should have
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Batch:
    """Names and image buffers, and for each a page-aligned buffer for its header."""

    def __init__(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> None:
        self.names = names
        self.images = images
        self.errors = [0] * len(names)
        self._pieces_left = [0] * len(names)
        self._heads: memoryview | None = None

    def head(self, block: int, size: int) -> memoryview:
        """The pages of the block's header."""
        if self._heads is None:
            self._heads = page_aligned(len(self.names) * size)
        return self._heads[block * size : (block + 1) * size]

    def transfers(
        self, block: int, volume: Volume, slot: int, *, is_write: bool
    ) -> Iterator[Transfer]:
        """The pieces of a block, all of which are expected to end."""
        head = self.head(block, volume.geometry.head_bytes)
        pieces = list(volume.transfers(slot, head, self.images[block], is_write, block))
        self._pieces_left[block] = len(pieces)
        yield from pieces

    def ends_block(self, transfer: Transfer, result: int) -> bool:
        """Note what became of a piece; true for the last one of its block."""
        block = transfer.block
        if result != transfer.size:
            self.errors[block] = -result if result < 0 else SHORT
        self._pieces_left[block] -= 1
        return not self._pieces_left[block]
