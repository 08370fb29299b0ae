"""Which images a tier keeps: what to take in when it is full, and what to give up for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol


class Policy(Protocol):
    def use(self, keys: Sequence[bytes]) -> None: ...
    def admit(self, key: bytes, parent: bytes) -> bool: ...
    def add(self, key: bytes, parent: bytes) -> None: ...
    def victim(self, is_held: Callable[[bytes], bool]) -> bytes | None: ...
    def remove(self, key: bytes) -> None: ...


class LRU:
    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def admit(self, key: bytes, parent: bytes) -> bool:
        return True

    def add(self, key: bytes, parent: bytes) -> None:
        self._order[key] = None

    def victim(self, is_held: Callable[[bytes], bool]) -> bytes | None:
        return next((key for key in self._order if not is_held(key)), None)

    def remove(self, key: bytes) -> None:
        del self._order[key]
