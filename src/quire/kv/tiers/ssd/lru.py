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
    """Everything is let in; the block that nobody asked for the longest goes."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the first one of a sequence is needed by all that follow
            if key in self._keys:
                self._keys.move_to_end(key)

    def admit(self, key: bytes, parent: bytes) -> bool:
        return True

    def add(self, key: bytes, parent: bytes) -> None:
        self._keys[key] = None

    def victim(self, pinned: Container[bytes]) -> bytes | None:
        return next((key for key in self._keys if key not in pinned), None)

    def remove(self, key: bytes) -> None:
        self._keys.pop(key, None)
