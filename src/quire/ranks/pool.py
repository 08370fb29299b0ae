"""The pools of all ranks as one: an image is their shards, one behind the other.

    slot of host memory    [ rank 0's shard | rank 1's shard | … ]    memory that all ranks share

Shards of a KV group that has smaller images are smaller, and lie as close together. Where ranks all
hold the same (`KVLayout.is_replicated`), an image is rank 0's: it writes it, and all ranks read it.

Rank 0 decides what is copied, and each rank copies its own. So whatever lies below host memory sees
whole images, and nothing of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kv.images import ImagePool
from quire.kv.pool import PagedKVCache
from quire.kv.pools.block_pool import Transfer
from quire.kv.tiers.memory import HostMemory
from quire.ranks.leader import Ranks


class ShardedTransfer(Transfer):
    """Images on their way, of which every rank moves its shards."""

    def __init__(self, own: Transfer, ranks: Ranks, number: int) -> None:
        super().__init__(began=time.perf_counter())
        self._own = own
        self._ranks = ranks
        self._number = number

    def done(self) -> bool:
        return self._own.done() and self._ranks.is_copied(self._number)

    def wait(self) -> None:
        self._own.wait()
        self._ranks.end_copy(self._number)
        self.seconds = time.perf_counter() - self.began


class ShardedPool(ImagePool):
    def __init__(self, own: PagedKVCache, ranks: Ranks) -> None:
        super().__init__(own.images, own.image_bytes)
        self._ranks = ranks
        self._replicated = own.layout.is_replicated
        self._shards = 1 if self._replicated else ranks.size

    @property
    def block_bytes(self) -> int:
        return self.images.shape[1] * self._shards

    @property
    def image_bytes(self) -> tuple[int, ...]:
        return tuple(size * self._shards for size in super().image_bytes)

    def host_memory(self, num_slots: int) -> HostMemory:
        return self._ranks.share_memory(self.block_bytes, num_slots, self.images.is_cuda)

    def to_host(
        self,
        blocks: Sequence[int],
        images: Tensor,
        slots: Sequence[int],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        if self._replicated:
            return super().to_host(blocks, images, slots, after, group)
        number = self._begin("to_host", blocks, slots, after, group)
        own = super().to_host(blocks, images, slots, group=group)
        return ShardedTransfer(own, self._ranks, number)

    def from_host(
        self,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[int],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        number = self._begin("from_host", blocks, slots, after, group)
        own = super().from_host(images, slots, blocks, group=group)
        return ShardedTransfer(own, self._ranks, number)

    def _begin(
        self,
        do: str,
        blocks: Sequence[int],
        slots: Sequence[int],
        after: torch.cuda.Event | None,
        group: int,
    ) -> int:
        """Tell the others. What rank 0 has done up to `after`, they have done too: the last thing
        in a step that touches KV comes before the last sum, which needs every rank's part."""
        if after is not None:
            after.synchronize()
        return self._ranks.begin_copy(do, blocks, slots, group)
