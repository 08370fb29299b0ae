"""Which blocks an engine's own tiers hold, told as it changes: what a router knows of a replica."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import IntFlag

from quire.kv.events import SHORT_KEY, BlockEvents
from quire.kv.image import BlockName

MOST_UNTOLD = 1 << 16  # blocks that are gone, before everything is told anew
MOST_AT_ONCE = 1 << 14


class Place(IntFlag):
    DEVICE = 1
    HOST = 2
    SSD = 4


def stands_for_chain(name: BlockName) -> bool:
    """Whether a tier that has this block is said to hold its place of the chain.

    Routers know the keys of chains. Those are the keys of the first KV group, which sees all tokens
    if any group does; the other full groups are offered and asked for together with it.
    """
    return name.group == 0


class BlockLog:
    """A block is held while any place has it. Tiers tell from their own threads.

    What has changed since the last `take` is kept as one entry a block, however often it changed.
    If no router takes them, the log starts over: the next `take` clears, and lists all blocks.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._changed: dict[bytes, bool] = {}  # whether it was held when it was last told
        self._begins = True
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there is something to tell."""
        return self._begins or bool(self._changed)

    def store(self, place: Place, keys: Iterable[bytes]) -> None:
        bit = int(place)
        with self._lock:
            for key in keys:
                short = key[:SHORT_KEY]
                before = self._places.get(short, 0)
                self._places[short] = before | bit
                if not before:
                    self._changed.setdefault(short, False)

    def remove(self, place: Place, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove(int(place), key[:SHORT_KEY])
            self._bound()

    def clear(self, place: Place) -> None:
        """All blocks of a place are gone."""
        bit = int(place)
        with self._lock:
            for short in [key for key, places in self._places.items() if places & bit]:
                self._remove(bit, short)
            self._bound()

    def take(self, most: int = MOST_AT_ONCE) -> BlockEvents:
        """What has changed, as much of it as fits one message; the rest comes with the next."""
        removed: list[bytes] = []
        stored: list[bytes] = []
        with self._lock:
            cleared, self._begins = self._begins, False
            for _ in range(min(most, len(self._changed))):
                key, was_held = self._changed.popitem()
                is_held = key in self._places
                if is_held != was_held:
                    (stored if is_held else removed).append(key)
        return BlockEvents(cleared, removed, stored)

    def _remove(self, bit: int, short: bytes) -> None:
        before = self._places.get(short, 0)
        if not before & bit:
            return
        if left := before & ~bit:
            self._places[short] = left
        else:
            del self._places[short]
            self._changed.setdefault(short, True)

    def _bound(self) -> None:
        if len(self._changed) > len(self._places) + MOST_UNTOLD:
            self._changed = dict.fromkeys(self._places, False)
            self._begins = True
