"""Sequences and the prefix cache: what of them is there, and what others may find."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from quire.engine.sequence import Sequence
from quire.kv.index import Node
from quire.kv.prefix import PrefixCache


class Prefixes:
    """The cache as the scheduler asks for it."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def match(self, sequence: Sequence) -> list[Node]:
        """Cached blocks of its tokens. The last token is always computed: its logits are wanted."""
        limit, tokens = self.cacheable(sequence), sequence.tokens.ids
        return self.cache.match(sequence.request.namespace, tokens, sequence.nodes, limit)

    def cacheable(self, sequence: Sequence) -> int:
        """How many of its tokens need not be computed if they are cached."""
        limit = sequence.tokens.count - 1
        if sequence.params.prompt_logprobs is not None:
            # Logits of cached tokens are gone: reuse only what has its logprobs already.
            limit = min(limit, len(sequence.request.prompt_logprobs))
        return limit

    def cached_tokens(self, sequence: Sequence) -> int:
        sequence.nodes = self.match(sequence)
        return len(sequence.nodes) * self.cache.block_size

    def is_being_computed(
        self, sequence: Sequence, cached: int, prefilling: list[Sequence]
    ) -> bool:
        """Whether another sequence is about to compute more of the same prefix."""
        if not self.cache.enabled or sequence.params.prompt_logprobs is not None:
            return False
        end = (cached // self.cache.block_size + 1) * self.cache.block_size
        return end < sequence.tokens.count and any(
            other.request.namespace == sequence.request.namespace
            and self._begin_alike(sequence, other, self._next_end(other, end))
            for other in prefilling
        )

    def _next_end(self, other: Sequence, end: int) -> int:
        """The end of the next block that it computes: behind `end` where that is no match, since
        the window in front of it has left."""
        if not self.cache.has_windows:
            return end
        return max(end, (other.num_computed // self.cache.block_size + 1) * self.cache.block_size)

    def _begin_alike(self, one: Sequence, other: Sequence, end: int) -> bool:
        """Whether two sequences have the same first `end` tokens.

        The last block is compared first, since that tells most prompts apart; blocks for which
        both have the same node of the index are not compared.
        """
        if other.tokens.count < end or one.tokens.count < end:
            return False
        last = end - self.cache.block_size
        if not np.array_equal(one.tokens.ids[last:end], other.tokens.ids[last:end]):
            return False
        shared = min(len(one.nodes), len(other.nodes))
        if not shared or one.nodes[shared - 1] is not other.nodes[shared - 1]:
            shared = 0
        start = shared * self.cache.block_size
        return np.array_equal(one.tokens.ids[start:last], other.tokens.ids[start:last])

    def publishable(self, sequence: Sequence, computed: int) -> bool:
        """Whether the `computed` tokens fill a block that others cannot find yet."""
        known = sequence.tokens.count
        full = (computed if computed < known else known) // self.cache.block_size
        return full > len(sequence.nodes) and self.cache.enabled

    def publish(self, sequence: Sequence, computed: int) -> int:
        """Let others find the full blocks among the `computed` tokens, as far as these are known.

        Returns how many blocks that adds.
        """
        assert sequence.table is not None
        block_size, nodes = self.cache.block_size, sequence.nodes
        before, full = len(nodes), min(computed, sequence.tokens.count) // block_size
        tokens = sequence.tokens.ids[before * block_size : full * block_size]
        blocks = [t.ids[before - t.first : full - t.first].tolist() for t in sequence.table.groups]
        self.cache.publish(sequence.request.namespace, nodes, tokens, *blocks)
        return full - before

    def withdraw(self, sequence: Sequence, count: int) -> None:
        assert sequence.table is not None
        for _ in range(count):
            node, place = sequence.nodes.pop(), len(sequence.nodes)
            blocks = [int(table.ids[place - table.first]) for table in sequence.table.groups]
            self.cache.withdraw(node, *blocks)

    def match_part(
        self, sequence: Sequence, apart_from: Collection[Node]
    ) -> tuple[Node, int] | None:
        """A block behind its whole ones that begins as its tokens go on, and with how many."""
        limit, tokens = self.cacheable(sequence), sequence.tokens.ids
        namespace, nodes = sequence.request.namespace, sequence.nodes
        return self.cache.match_part(namespace, nodes, tokens, limit, apart_from)
