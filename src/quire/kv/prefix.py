"""The prefix cache: allocator and index kept in step, behind three verbs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.kv.allocator import BlockAllocator
from quire.kv.block_log import BlockLog, Place
from quire.kv.grouped_table import GroupedTable, Table
from quire.kv.hit_rule import Window, first_needed, longest_hit
from quire.kv.index import GONE, Node, PrefixIndex, TokenIds, find_key
from quire.kv.keys import Namespace
from quire.kv.room import most_held
from quire.kv.table import BlockTable

LEAST_SHARE = 16  # of a block: a copy moves the whole image, however little of it is kept


class PrefixCache:
    """Finds, publishes and withdraws full blocks. Switched off, it finds and keeps nothing.

    `windows`: of each KV group, None where a token sees all before it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enabled: bool = True,
        windows: Sequence[Window] = (None,),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enabled = enabled
        self.windows = tuple(windows)
        self.num_groups = len(self.windows)
        # Groups with the same window have the same blocks of a chain: one of them stands for all.
        self._groups_by_window = {
            window: self.windows.index(window) for window in self.windows if window is not None
        }
        self._log: BlockLog | None = None
        self._namespace: Namespace | None = None
        self.reset()

    def reset(self) -> None:
        """Every block is free and nothing is known; tables made before are void."""
        self.allocator = BlockAllocator(self.num_blocks)
        self.index = PrefixIndex(self.block_size, self.windows)
        self.allocator.on_evict = self._evict
        if self._log is not None:
            self._log.clear(Place.DEVICE)
            self.index.on_leave = self._tell_left

    def publish_events(self, log: BlockLog, namespace: Namespace) -> None:
        """Let `log` know what can be found; before anything is, and for good.

        `namespace` says what the keys of blocks are made from.
        """
        assert not self.index, "what was published before would never be told"
        self._log, self._namespace = log, namespace
        self.index.on_leave = self._tell_left

    @property
    def has_windows(self) -> bool:
        return bool(self._groups_by_window)

    def new_table(self) -> Table:
        if self.num_groups == 1:
            return BlockTable(self.allocator, self.block_size, self.windows[0])
        return GroupedTable(self.allocator, self.block_size, self.windows)

    def table_behind(self, chain: list[Node], part: Node | None = None, count: int = 0) -> Table:
        """A table that shares what a match found: of windows, what the next token looks into.

        With a `part` the first `count` tokens of its blocks, too, of which the table makes copies.
        """
        table = self.new_table()
        length = len(chain) * self.block_size + count
        nodes = chain if part is None else [*chain, part]
        for group, of_group in enumerate(table.groups):
            first = first_needed(length, of_group.window, self.block_size)
            blocks = [node.blocks[group] for node in nodes[first:]]
            of_group.adopt(blocks, length, first)
        return table

    def blocks_needed(self, chain: list[Node], num_tokens: int, most_ahead: int) -> int:
        """How many more blocks are in use at once until `num_tokens` are computed behind a match.

        `most_ahead`: tokens that are planned and not committed, at most.
        """
        block_size, holders = self.block_size, self.allocator.ref_counts
        total, matched = -(-num_tokens // block_size), len(chain)
        needed = 0
        for group, window in enumerate(self.windows):
            first = first_needed(matched * block_size, window, block_size)
            held = sum(holders[node.blocks[group]] > 0 for node in chain[first:])
            most = most_held(num_tokens, window, block_size, most_ahead)
            # What others hold of a window they may hold for longer than this sequence does.
            needed += min(most, total - first - held)
        return needed

    def match(
        self, namespace: str, token_ids: TokenIds, known: list[Node], limit: int
    ) -> list[Node]:
        """Cached blocks that hold the first tokens, `limit` tokens at most."""
        if not self.enabled:
            return []
        most = limit // self.block_size
        chain = self.index.match(namespace, token_ids[: most * self.block_size], known[:most])
        return chain[: self._longest_hit(chain)] if self._groups_by_window else chain

    def _longest_hit(self, chain: list[Node]) -> int:
        windows, groups = zip(*self._groups_by_window.items(), strict=True)

        def has(at: int, place: int) -> bool:
            block: int = chain[place].blocks[groups[at]]
            return block != GONE

        return longest_hit(len(chain), windows, self.block_size, has)

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
        self, namespace: str, chain: list[Node], token_ids: TokenIds, *blocks: list[int]
    ) -> None:
        """Let others find `blocks` of each group, which hold `token_ids` behind `chain`.

        The chain grows.
        """
        before = len(chain)
        self.index.publish(namespace, chain, token_ids, *blocks)
        self._mark_keyed(chain[before:], blocks)
        if self._log is not None and len(chain) > before:
            self._tell(self._log, namespace, chain[before:])

    def publish_loaded(
        self, namespace: str, token_ids: TokenIds, loaded: Sequence[dict[int, int]]
    ) -> list[Node]:
        """Let others find blocks that came from a lower tier: of each group, by place in the chain.

        Of use is what has the full groups of all places before it, and at a place all blocks of a
        window. Returns the chain of nodes, as far as it goes now.
        """
        whole = [self._of_use(group, loaded) for group in range(self.num_groups)]
        known = len(self.index.match(namespace, token_ids))
        length = max([known, *(max(of_group) + 1 for of_group in whole if of_group)])
        if None in self.windows:
            of_full = whole[self.windows.index(None)]
            length = next((at for at in range(known, length) if at not in of_full), length)
        blocks = [[of_group.get(at, GONE) for at in range(length)] for of_group in whole]
        chain: list[Node] = []
        self.index.publish(namespace, chain, token_ids[: length * self.block_size], *blocks)
        self._mark_keyed(chain, blocks)
        if self._log is not None and length > known:
            self._tell(self._log, namespace, chain[known:])
        return chain

    def _of_use(self, group: int, loaded: Sequence[dict[int, int]]) -> dict[int, int]:
        """Where all groups with the same window have their blocks, too."""
        window = self.windows[group]
        alike = [other for other, each in enumerate(self.windows) if each == window]
        if len(alike) == 1:
            return loaded[group]
        places = set(loaded[group]).intersection(*(loaded[other] for other in alike))
        return {place: block for place, block in loaded[group].items() if place in places}

    def _mark_keyed(self, nodes: Sequence[Node], blocks: Sequence[Sequence[int]]) -> None:
        """Mark the blocks that the nodes took; they did not where another was there before."""
        mark_keyed = self.allocator.mark_keyed
        for group, of_group in enumerate(blocks):
            for node, block in zip(nodes, of_group, strict=True):
                if block != GONE and node.blocks[group] == block:
                    mark_keyed(block)

    def withdraw(self, node: Node, *blocks: int) -> None:
        """Take back a `publish`: the blocks do not hold those tokens after all."""
        for group, block in enumerate(blocks):
            if node.blocks[group] == block:
                for gone in (block, *self.index.forget(block)):
                    self.allocator.unkey(gone)

    def clear(self) -> int:
        """Forget all blocks that no sequence holds; returns how many were set free."""
        return self.allocator.evict_cached()

    def delete(self, namespace: str, token_ids: TokenIds | None = None) -> int:
        """Let a namespace's blocks be found no more, or those that share a first block with tokens.

        Those that a sequence holds are free when it ends. Returns how many blocks there were.
        """
        first = None
        if token_ids is not None:
            first = token_ids[: self.index.block_size].tobytes()
        blocks = self.index.blocks_in(namespace, first)
        for block in blocks:
            if block in self.index:
                for gone in (block, *self.index.forget(block)):
                    self.allocator.unkey(gone)
        return len(blocks)

    def _tell(self, log: BlockLog, salt: str, nodes: list[Node]) -> None:
        assert self._namespace is not None
        find_key(nodes[-1], self._namespace.root_of(salt))  # and with it those before it
        log.store(Place.DEVICE, [node.key for node in nodes if node.key and node.is_found])

    def _tell_left(self, node: Node) -> None:
        if self._log is not None and node.key is not None:
            self._log.remove(Place.DEVICE, [node.key])

    def _evict(self, block: int) -> None:
        for other in self.index.evict(block):
            self.allocator.evict_along(other)
