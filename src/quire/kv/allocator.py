"""Hands out block ids, counts references, and keeps released blocks that may be matched again.

A block is in one of three states:

    free     no sequence holds it, and its bytes mean nothing
    in use   `ref_count` tables hold it
    cached   no sequence holds it, but the prefix index can still find what it contains

Cached blocks are given away only when no free block is left: first those that were released to be
evicted first, then the least recently used. No bytes move then: the index is told to forget the
block as it is handed out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from quire.errors import QuireError


class OutOfBlocks(QuireError):
    """More blocks were asked for than are free or cached."""


def _ignore(block: int) -> None:
    pass


class BlockAllocator:
    """A fixed number of blocks; every operation is O(1) for each block it touches."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.on_evict: Callable[[int], None] = _ignore
        self.num_allocated = 0  # since the start, for rates
        self.num_evicted = 0
        self._keyed = bytearray(num_blocks)
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._evict_first: OrderedDict[int, None] = OrderedDict()  # cached as well, before those

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._evict_first)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can hand out now."""
        return len(self._free) + len(self._cached) + len(self._evict_first)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with a reference count of one, or none at all."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks were asked for and {self.num_available} are left.")
        self.num_allocated += count
        free = self._free
        blocks = [free.popleft() for _ in range(min(count, len(free)))]
        while len(blocks) < count:  # what is evicted may take others along, which are free then
            blocks.append(free.popleft() if free else self._evict_next())
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that are in use or cached."""
        for block in blocks:
            if self.ref_counts[block] == 0 and self._cached.pop(block, self) is self:
                del self._evict_first[block]  # a free block cannot be shared: KeyError is a bug
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int], evict_first: bool = False) -> None:
        """Drop an owner. Give a table's blocks tail first, so that prefixes outlive suffixes.

        `evict_first`: what stays cached is less likely to be matched than any other block.
        """
        cached = self._evict_first if evict_first else self._cached
        for block in blocks:
            count = self.ref_counts[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} was released more often than it was taken")
            self.ref_counts[block] = count
            if count == 0:
                if self._keyed[block]:
                    cached[block] = None
                else:
                    self._free.append(block)

    def touch(self, blocks: Iterable[int]) -> None:
        """Make cached blocks the most recently used, last one first to survive."""
        for block in blocks:
            if block in self._cached:
                self._cached.move_to_end(block)
            elif self._evict_first.pop(block, self) is None:
                self._cached[block] = None

    @property
    def keyed(self) -> bytearray:
        """By block: 1 if the index can find it. To be looked at, not changed."""
        return self._keyed

    def is_keyed(self, block: int) -> bool:
        return bool(self._keyed[block])

    def mark_keyed(self, block: int) -> None:
        """The index can find this block: keep it as cached once no sequence holds it."""
        self._keyed[block] = 1

    def unkey(self, block: int) -> None:
        """The index has forgotten this block: once no sequence holds it, it is free."""
        self._keyed[block] = 0
        if self._cached.pop(block, self) is None or self._evict_first.pop(block, self) is None:
            self._free.append(block)

    def evict_along(self, block: int) -> None:
        """Another was evicted without which this one is of no use."""
        self.num_evicted += 1
        self.unkey(block)

    def evict_cached(self) -> int:
        """Turn every cached block into a free one; returns how many there were."""
        count = self.num_cached
        while self.num_cached:
            self._free.append(self._evict_next())
        return count

    def _evict_next(self) -> int:
        block, _ = (self._evict_first or self._cached).popitem(last=False)
        self._keyed[block] = 0
        self.num_evicted += 1
        self.on_evict(block)
        return block
