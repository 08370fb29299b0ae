"""Finds blocks by content: a trie whose edges are the token ids of one full block.

    root (namespace) ─ [t0 … t15] → node(block 7) ─ [t16 … t31] → node(block 3) ─ …

A child is looked up by the very bytes of its token ids, so a match is a comparison of tokens and
never of hashes alone. A node has a block of each KV group, `GONE` where that was given away. Of use
are the blocks of all groups with the same window, or none: they go together.

    full groups   with a block the node goes: its parent no longer knows it, and its descendants
                  cannot be reached any more and are evicted in their turn
    windows       the node stays, on the way to others behind it, as long as it has any block or
                  child: a prefix needs the blocks of a window in front of its end alone
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from quire.kv.hit_rule import Window
from quire.kv.keys import chain_keys

MOST_COMPARED = 64
MOST_REMEMBERED = 1 << 16  # blocks that were here once
GONE = -1
TokenIds = npt.NDArray[np.int32]


class Node:
    """One full block of tokens behind a given prefix, and the blocks that hold its KV."""

    __slots__ = (
        *("blocks", "children", "digest", "is_found", "key", "offered", "parent", "tokens"),
    )

    def __init__(self, parent: Node | None, tokens: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks  # by group
        self.is_found = True  # under its parent; never again, once it is not
        self.children: dict[bytes, Node] = {}
        self.digest = _digest(parent, tokens)
        self.key: bytes | None = None  # outside this process, once it was asked for
        self.offered = 0  # to the tiers below: bit by bit the groups of which it was

    @property
    def block(self) -> int:
        """Where there is one group."""
        return self.blocks[0]


def find_key(node: Node, root: bytes) -> bytes:
    """The node's key outside this process, found once and kept, as are those before it.

    `root` is the key of its namespace.
    """
    unknown: list[Node] = []
    at: Node | None = node
    while at is not None and at.key is None and at.parent is not None:
        unknown.append(at)
        at = at.parent
    known = at.key if at is not None else None
    unknown.reverse()
    keys = chain_keys(known or root, [each.tokens for each in unknown])
    for each, key in zip(unknown, keys, strict=True):
        each.key = key
    assert node.key is not None
    return node.key


class PrefixIndex:
    """All full blocks that can be matched, by namespace and content.

    `windows` are those of the KV groups; `on_leave` is told of nodes that can be found no more.
    """

    def __init__(
        self,
        block_size: int,
        windows: Sequence[Window] = (None,),
        on_leave: Callable[[Node], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.on_leave = on_leave
        self._windows = tuple(windows)
        self._roots: dict[str, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._evicted: OrderedDict[int, None] = OrderedDict()  # digests, the first to leave first

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(
        self, namespace: str, token_ids: TokenIds, known: list[Node] | None = None
    ) -> list[Node]:
        """The longest chain of nodes that holds a prefix of `token_ids`, full blocks only.

        Full groups have a block at each; which windows are whole is not looked at.

        `known` is a chain found earlier for the same tokens: what is still alive of it is taken
        over without looking at the tokens again, and only the rest is walked.
        """
        chain: list[Node] = []
        for node in known or ():
            if not node.is_found:
                break
            chain.append(node)
        at = chain[-1] if chain else self._roots.get(namespace)
        if at is None:
            return chain
        width = 4 * self.block_size
        tail = token_ids[len(chain) * self.block_size :]
        packed = tail.tobytes()
        for start in range(0, len(packed) - width + 1, width):
            child = at.children.get(packed[start : start + width])
            if child is None:
                break
            chain.append(child)
            at = child
        return chain

    def nearest(
        self,
        namespace: str,
        chain: list[Node],
        token_ids: TokenIds,
        least: int = 1,
        apart_from: Collection[Node] = (),
    ) -> tuple[Node | None, int]:
        """The block behind `chain` that begins with the most of `token_ids`, and with how many.

        All groups have it. None, if no block has the first `least` of them. A popular prefix may
        have thousands of blocks behind it: only the latest are looked at.
        """
        parent = chain[-1] if chain else self._roots.get(namespace)
        if parent is None or not parent.children or len(token_ids) < least:
            return None, 0
        head = token_ids[:least].tobytes()
        latest = islice(reversed(parent.children.items()), MOST_COMPARED)
        alike = [
            node
            for tokens, node in latest
            if tokens.startswith(head) and GONE not in node.blocks and node not in apart_from
        ]
        if not alike:
            return None, 0
        common = _common([node.tokens for node in alike], token_ids)
        best = int(common.argmax())
        return alike[best], int(common[best])

    def prefer(self, node: Node) -> None:
        """It counts as the latest behind its parent: what is wanted stays within reach."""
        assert node.parent is not None and node.is_found
        siblings = node.parent.children
        siblings[node.tokens] = siblings.pop(node.tokens)

    def was_evicted(self, namespace: str, chain: list[Node], token_ids: TokenIds) -> bool:
        """Whether this block behind `chain` was here and had to leave, as far as is remembered.

        So it was where it has a node that was no match: the window in front of its end has left.
        """
        tokens = token_ids.tobytes()
        parent = chain[-1] if chain else Node(None, _packed(namespace), [])
        known = chain[-1] if chain else self._roots.get(namespace)
        node = known.children.get(tokens) if known is not None else None
        if node is not None and GONE in node.blocks:
            return True
        return _digest(parent, tokens) in self._evicted

    def publish(
        self, namespace: str, chain: list[Node], token_ids: TokenIds, *blocks: list[int]
    ) -> None:
        """Say that `blocks` of each group hold `token_ids` behind `chain`, which grows by nodes.

        Where another block was there first with the same content, its node is taken, and the new
        block stays private to its owner. Windows may have left a place already: `GONE`.
        """
        width = 4 * self.block_size
        packed = token_ids.tobytes()
        parent = chain[-1] if chain else self._root(namespace)
        for at, of_node in enumerate(zip(*blocks, strict=True)):
            parent = self._child(parent, packed[at * width : (at + 1) * width], of_node)
            chain.append(parent)

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, _packed(namespace), [])
        return root

    def _child(self, parent: Node, tokens: bytes, blocks: Sequence[int]) -> Node:
        if not parent.is_found:  # its prefix cannot be found, so nor can it
            unreachable = Node(parent, tokens, [GONE] * len(blocks))
            unreachable.is_found = False
            return unreachable
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, list(blocks))
            for block in blocks:
                if block != GONE:
                    self._by_block[block] = node
        elif GONE in node.blocks:
            self._fill(node, blocks)
        return node

    def _fill(self, node: Node, blocks: Sequence[int]) -> None:
        """Windows that have left a node are there again."""
        for group, block in enumerate(blocks):
            if node.blocks[group] == GONE and block != GONE:
                node.blocks[group] = block
                self._by_block[block] = node

    def key(self, block: int) -> bytes | None:
        """The key of a block that can be found, if it was asked for before."""
        return self._by_block[block].key

    def content(self, block: int) -> tuple[str, bytes] | None:
        """The namespace and the token ids of a block that can be found."""
        node = self._by_block.get(block)
        if node is None:
            return None
        top = node
        while top.parent is not None:
            top = top.parent
        return _unpacked(top.tokens), node.tokens

    def namespaces(self) -> list[str]:
        """Those that have blocks."""
        return list(self._roots)

    def blocks_in(self, namespace: str, first: bytes | None = None) -> list[int]:
        """Blocks of a namespace, or of it those that begin with the tokens of one block `first`.

        What is behind comes first, so that they can be forgotten in this order.
        """
        top = self._roots.get(namespace)
        if top is not None and first is not None:
            top = top.children.get(first)
        reached = [top] if top is not None else []
        nodes: list[Node] = []
        while reached:
            nodes.append(reached.pop())
            reached += nodes[-1].children.values()
        return [block for node in reversed(nodes) for block in node.blocks if block != GONE]

    def evict(self, block: int) -> list[int]:
        """Forget a block for want of room, and with it those that are returned."""
        self._evicted[self._by_block[block].digest] = None
        if len(self._evicted) > MOST_REMEMBERED:
            self._evicted.popitem(last=False)
        return self.forget(block)

    def forget(self, block: int) -> list[int]:
        """The block is reused: nothing may match it from now on.

        Returns further blocks of its node that are of no use without it; they are forgotten too.
        """
        node = self._by_block.pop(block)
        blocks = node.blocks
        window = self._windows[blocks.index(block)]
        others: list[int] = []
        for group, other in enumerate(blocks):
            if window is None or self._windows[group] == window:
                blocks[group] = GONE
                if other not in (GONE, block):
                    del self._by_block[other]
                    others.append(other)
        self._prune(node)
        return others

    def _prune(self, node: Node) -> None:
        """Take it out of the tree if it leads nowhere, and then its parents that led to it alone.

        Without the blocks of full groups it has none at all, and what is behind it is cut off.
        """
        parent = node.parent
        while parent is not None and self._leads_nowhere(node):
            node.is_found = False
            if parent.children.get(node.tokens) is node:
                del parent.children[node.tokens]
            if self.on_leave is not None:
                self.on_leave(node)
            node, parent = parent, parent.parent
        if parent is None and not node.children:
            self._roots.pop(_unpacked(node.tokens), None)  # an unused namespace costs nothing

    def _leads_nowhere(self, node: Node) -> bool:
        if not node.is_found or any(block != GONE for block in node.blocks):
            return False
        return not node.children or None in self._windows


def _digest(parent: Node | None, tokens: bytes) -> int:
    """For telling why, never for finding: two chains may have the same."""
    return hash((parent.digest if parent is not None else None, tokens))


def _common(blocks: list[bytes], token_ids: TokenIds) -> npt.NDArray[np.intp]:
    """How many of the first `token_ids` each block begins with."""
    rows = np.frombuffer(b"".join(blocks), np.int32).reshape(len(blocks), -1)
    same = rows[:, : len(token_ids)] == token_ids
    counts: npt.NDArray[np.intp] = np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1))
    return counts


def _packed(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")  # any string may be a salt


def _unpacked(tokens: bytes) -> str:
    return tokens.decode("utf-8", "surrogatepass")
