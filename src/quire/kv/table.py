"""A sequence's page table: which block holds its tokens, in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.kv.allocator import BlockAllocator
from quire.kv.hit_rule import Window, first_needed
from quire.kv.kept_windows import is_kept

BlockCopy = tuple[int, int]  # (source, target): copy the image before the step writes


class BlockTable:
    """Grows by tokens, shares by reference, copies a last block that is not its alone to write.

        length 37, block_size 16:   [ 7 | 3 | 9 ]      block 9 has 5 of its 16 slots taken

    The ids live in one growing array, so that a step's tables are made without a Python loop. With
    a window the table gives back its first blocks once no later token can see them:

        first 1, window 20:         ( . | 3 | 9 )      block 7 is others' now; ids are 3 and 9
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, window: Window = None) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.window = window
        self.first = 0  # leading blocks that were given back, or never taken over
        self.length = 0  # tokens that have a slot
        self.room = 0  # slots left in a last block that is known to be this table's alone
        self._ids = np.zeros(8, dtype=np.int32)
        self._count = 0

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The blocks from `first` on, as a view that is valid until the next change."""
        return self._ids[: self._count]

    @property
    def groups(self) -> tuple[BlockTable, ...]:
        """The table of each KV group; this is the only one."""
        return (self,)

    def __len__(self) -> int:
        return self._count

    def adopt(self, blocks: list[int], length: int | None = None, first: int = 0) -> None:
        """Begin with blocks found in the cache: full ones, shared with other sequences.

        With `length`, only so many tokens are taken over. If that is part of the last block, the
        next token goes into a copy of it. `first`: the place of the first of these blocks.
        """
        assert self.length == 0 and self._count == 0
        self.allocator.share(blocks)
        self._extend(blocks)
        self.first = first
        self.length = (first + len(blocks)) * self.block_size if length is None else length

    def blocks_needed(self, num_tokens: int) -> int:
        """How many blocks `append(num_tokens)` would take from the allocator."""
        if num_tokens <= self.room:
            return 0
        total = -(-(self.length + num_tokens) // self.block_size)
        return total - self.first - self._count + self.must_copy_last()

    def append(self, num_tokens: int) -> list[BlockCopy]:
        """Make room for `num_tokens` more; returns the copies to make before they are written."""
        if num_tokens <= self.room:  # most often: a token more in a block it has written before
            self.room -= num_tokens
            self.length += num_tokens
            return []
        new = self.allocator.allocate(self.blocks_needed(num_tokens))
        copies: list[BlockCopy] = []
        if num_tokens and self.must_copy_last():
            last = int(self._ids[self._count - 1])
            copies.append((last, new[0]))
            self._ids[self._count - 1] = new.pop(0)
            self.allocator.release([last])
        self._extend(new)
        self.length += num_tokens
        self.room = (self.first + self._count) * self.block_size - self.length
        return copies

    def fork(self) -> BlockTable:
        """A second table over the same blocks."""
        self.room = 0
        twin = BlockTable(self.allocator, self.block_size, self.window)
        self.allocator.share(self.ids.tolist())
        twin._ids, twin._count, twin.first = self._ids.copy(), self._count, self.first
        twin.length = self.length
        return twin

    def truncate(self, length: int) -> None:
        """Forget the tokens past `length` and give back the blocks that held only them."""
        assert 0 <= length <= self.length
        if length == 0:
            keep = self.first = 0
        else:
            keep = -(-length // self.block_size) - self.first
            assert keep >= 0, "a window cannot go back to what it has given back"
        self.allocator.release(self._ids[keep : self._count][::-1].tolist())
        self._count = keep
        self.length = length
        self.room = 0

    def give_back(self, length: int, prompt_len: int = 0) -> None:
        """The first `length` tokens are there for good: release the blocks no later token sees.

        What the window in front of the last whole block needs is kept: another sequence with these
        tokens, or this one if it has to begin again, would go on from there.
        """
        if self.window is None:
            return
        size = self.block_size
        first = first_needed(length // size * size, self.window, size)
        count = first - self.first
        if count <= 0:
            return
        kept: list[int] = []
        unlikely: list[int] = []
        for place, block in enumerate(self._ids[:count].tolist(), self.first):
            (kept if is_kept(place, self.window, size, prompt_len) else unlikely).append(block)
        self.allocator.release(unlikely, evict_first=True)
        self.allocator.release(kept[::-1])
        self._ids[: self._count - count] = self._ids[count : self._count]
        self._count -= count
        self.first = first

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where the tokens at positions `start` to `stop` live in the pool."""
        positions = np.arange(start, stop, dtype=np.int64)
        blocks = self._ids[positions // self.block_size - self.first].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def must_copy_last(self) -> bool:
        """Whether the next token goes into a block that others hold, or can find."""
        if self.length == (self.first + self._count) * self.block_size:
            return False
        last = int(self._ids[self._count - 1])
        return self.allocator.ref_counts[last] > 1 or self.allocator.is_keyed(last)

    def _extend(self, blocks: list[int]) -> None:
        count = self._count + len(blocks)
        if count > len(self._ids):
            longer = np.zeros(max(count, 2 * len(self._ids)), dtype=np.int32)
            longer[: self._count] = self.ids
            self._ids = longer
        self._ids[self._count : count] = blocks
        self._count = count
