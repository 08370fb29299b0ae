"""What decides which blocks stay, and the simplest such policy: keep what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Protocol


class Policy(Protocol):
    """Called by one thread at a time."""

    def use(self, keys: Sequence[bytes]) -> None:
        """A request asked for these, held or not, from its first block on."""

    def admit(self, key: bytes, parent: bytes) -> bool:
        """Whether a block is worth the one that would have to go."""

    def add(self, key: bytes, parent: bytes) -> None:
        """The block is held from now on."""

    def victim(self, pinned: Container[bytes]) -> bytes | None:
        """The block to lose next, none of those that are pinned."""

    def remove(self, key: bytes) -> None:
        """The block is not held any more."""


class LeastRecentlyUsed:
    """Everything is let in; of the blocks that end a sequence, the one used longest ago goes.

    A block without its predecessors is of no use, so prefixes outlive what follows them.
    """

    def __init__(self) -> None:
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()  # by key, used longest ago first
        self._children: dict[bytes, int] = {}

    def use(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._parents:
                self._parents.move_to_end(key)

    def admit(self, key: bytes, parent: bytes) -> bool:
        return True

    def add(self, key: bytes, parent: bytes) -> None:
        self._parents[key] = parent
        self._children[parent] = self._children.get(parent, 0) + 1

    def victim(self, pinned: Container[bytes]) -> bytes | None:
        ends = (key for key in self._parents if key not in self._children)
        return next((key for key in ends if key not in pinned), None)

    def remove(self, key: bytes) -> None:
        parent = self._parents.pop(key)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
