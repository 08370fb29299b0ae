"""A sequence's page tables where its model has several KV groups: one a group, changed together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.kv.allocator import BlockAllocator, OutOfBlocks
from quire.kv.hit_rule import Window
from quire.kv.table import BlockCopy, BlockTable


class GroupedTable:
    """Used as a `BlockTable`; all groups have the same length, and blocks of one allocator."""

    def __init__(
        self, allocator: BlockAllocator, block_size: int, windows: Sequence[Window]
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.groups = tuple(BlockTable(allocator, block_size, window) for window in windows)

    @property
    def length(self) -> int:
        return self.groups[0].length

    @property
    def room(self) -> int:
        """All groups copy, fork and fill their last blocks at once, so they have the same."""
        return self.groups[0].room

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """All blocks that it holds, group by group."""
        return np.concatenate([table.ids for table in self.groups])

    def __len__(self) -> int:
        return sum(len(table) for table in self.groups)

    def blocks_needed(self, num_tokens: int) -> int:
        return sum(table.blocks_needed(num_tokens) for table in self.groups)

    def append(self, num_tokens: int) -> list[BlockCopy]:
        """In all groups, or in none where there are too few blocks."""
        groups = self.groups
        if num_tokens <= groups[0].room:
            for table in groups:
                table.room -= num_tokens
                table.length += num_tokens
            return []
        needed, available = self.blocks_needed(num_tokens), self.allocator.num_available
        if needed > available:
            raise OutOfBlocks(f"{needed} blocks were asked for and {available} are left.")
        return [copy for table in groups for copy in table.append(num_tokens)]

    def fork(self) -> GroupedTable:
        twin = GroupedTable(self.allocator, self.block_size, ())
        twin.groups = tuple(table.fork() for table in self.groups)
        return twin

    def truncate(self, length: int) -> None:
        for table in self.groups:
            table.truncate(length)

    def give_back(self, length: int, prompt_len: int = 0) -> None:
        for table in self.groups:
            table.give_back(length, prompt_len)


Table = BlockTable | GroupedTable
