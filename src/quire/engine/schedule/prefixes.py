"""Sequences and the prefix cache: what of them is there, and what others may find."""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.sequence import Sequence
from quire.kv.index import Node, TokenIds
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
        block_size = self.cache.block_size
        for other in prefilling:
            if other.request.namespace == sequence.request.namespace:
                common = _common_prefix(sequence.tokens.ids[:-1], other.tokens.ids)
                if common // block_size * block_size > cached:
                    return True
        return False

    def publishable(self, sequence: Sequence, computed: int) -> bool:
        """Whether the `computed` tokens fill a block that others cannot find yet."""
        cache, known = self.cache, sequence.tokens.count
        if computed < known:
            known = computed
        return cache.enabled and known // cache.block_size > len(sequence.nodes)

    def publish(self, sequence: Sequence, computed: int) -> int:
        """Let others find the full blocks among the `computed` tokens, as far as these are known.

        Returns how many blocks that adds.
        """
        assert sequence.table is not None
        block_size, nodes = self.cache.block_size, sequence.nodes
        before, full = len(nodes), min(computed, sequence.tokens.count) // block_size
        tokens = sequence.tokens.ids[before * block_size : full * block_size]
        blocks = sequence.table.ids[before:full].tolist()
        self.cache.publish(sequence.request.namespace, nodes, tokens, blocks)
        return full - before

    def withdraw(self, sequence: Sequence, count: int) -> None:
        assert sequence.table is not None
        for _ in range(count):
            node = sequence.nodes.pop()
            self.cache.withdraw(node, int(sequence.table.ids[len(sequence.nodes)]))

    def match_part(
        self, sequence: Sequence, apart_from: Collection[Node]
    ) -> tuple[int, int] | None:
        """A block behind its whole ones that begins as its tokens go on, and with how many."""
        limit, tokens = self.cacheable(sequence), sequence.tokens.ids
        namespace, nodes = sequence.request.namespace, sequence.nodes
        part = self.cache.match_part(namespace, nodes, tokens, limit, apart_from)
        return None if part is None else (part[0].block, part[1])


def _common_prefix(a: TokenIds, b: TokenIds) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
