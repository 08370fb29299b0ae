"""The prefix cache: allocator and index kept in step, behind three verbs."""

from __future__ import annotations

from collections.abc import Collection

from quire.kv.allocator import BlockAllocator
from quire.kv.block_log import BlockLog, Place
from quire.kv.index import GONE, Node, PrefixIndex, TokenIds, find_key
from quire.kv.keys import Namespace
from quire.kv.table import BlockTable

LEAST_SHARE = 16  # of a block: a copy moves the whole image, however little of it is kept


class PrefixCache:
    """Finds, publishes and withdraws full blocks. Switched off, it finds and keeps nothing."""

    def __init__(self, num_blocks: int, block_size: int, enabled: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enabled = enabled
        self._log: BlockLog | None = None
        self._namespace: Namespace | None = None
        self.reset()

    def reset(self) -> None:
        """Every block is free and nothing is known; tables made before are void."""
        self.allocator = BlockAllocator(self.num_blocks)
        self.index = PrefixIndex(self.block_size)
        self.allocator.on_evict = self.index.evict
        if self._log is not None:
            self._log.clear(Place.DEVICE)
            self.allocator.on_evict = self._evict

    def publish_events(self, log: BlockLog, namespace: Namespace) -> None:
        """Let `log` know what can be found; before anything is, and for good.

        `namespace` says what the keys of blocks are made from.
        """
        assert not self.index, "what was published before would never be told"
        self._log, self._namespace = log, namespace
        self.allocator.on_evict = self._evict

    def new_table(self) -> BlockTable:
        return BlockTable(self.allocator, self.block_size)

    def match(
        self, namespace: str, token_ids: TokenIds, known: list[Node], limit: int
    ) -> list[Node]:
        """Cached blocks that hold the first tokens, `limit` tokens at most."""
        if not self.enabled:
            return []
        most = limit // self.block_size
        return self.index.match(namespace, token_ids[: most * self.block_size], known[:most])

    def match_part(
        self,
        namespace: str,
        chain: list[Node],
        token_ids: TokenIds,
        limit: int,
        apart_from: Collection[Node],
    ) -> tuple[Node, int] | None:
        """A cached block behind `chain`, the match of `token_ids`, that begins as they go on; and
        how many tokens that is, so that the match becomes `limit` tokens long at most.

        None if there is none that is worth a copy, but for `apart_from`.
        """
        if not self.enabled:
            return None
        start = len(chain) * self.block_size
        rest = token_ids[start : min(limit, start + self.block_size)]
        least = max(1, self.block_size // LEAST_SHARE)
        node, count = self.index.nearest(namespace, chain, rest, least, apart_from)
        if node is None:
            return None
        self.index.prefer(node)
        return node, count

    def publish(
        self, namespace: str, chain: list[Node], token_ids: TokenIds, blocks: list[int]
    ) -> None:
        """Let others find `blocks`, which hold `token_ids` behind `chain`; the chain grows."""
        before = len(chain)
        self.index.publish(namespace, chain, token_ids, blocks)
        for node, block in zip(chain[before:], blocks, strict=True):
            if node.block == block:
                self.allocator.mark_keyed(block)
        if self._log is not None and blocks:
            self._tell(self._log, namespace, chain[before:])

    def withdraw(self, node: Node, block: int) -> None:
        """Take back a `publish`: the block does not hold those tokens after all."""
        if node.block == block:
            if self._log is not None and node.key is not None:
                self._log.remove(Place.DEVICE, [node.key])
            self.index.forget(block)
            self.allocator.unkey(block)

    def clear(self) -> int:
        """Forget all blocks that no sequence holds; returns how many were set free."""
        return self.allocator.evict_cached()

    def _tell(self, log: BlockLog, salt: str, nodes: list[Node]) -> None:
        assert self._namespace is not None
        find_key(nodes[-1], self._namespace.root_of(salt))  # and with it those before it
        log.store(Place.DEVICE, [node.key for node in nodes if node.key and node.block != GONE])

    def _evict(self, block: int) -> None:
        key = self.index.key(block)
        if self._log is not None and key is not None:
            self._log.remove(Place.DEVICE, [key])
        self.index.evict(block)
