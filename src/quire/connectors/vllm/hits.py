"""What a worker's tiers have of a request, from the look-up to the load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from quire.connectors.vllm.orders import Tables
from quire.kv.grouped_match import GroupedMatch
from quire.kv.image import BlockName
from quire.kv.loads import Load
from quire.kv.store import KVStore

FETCH_S = 2.0  # for images to come to host memory, before they count as missing


class Hit(Protocol):
    """Blocks of a request behind those that vLLM has. It is loaded or dropped, once."""

    def ready(self) -> bool: ...
    def __len__(self) -> int: ...
    def load(self, tables: Tables) -> Load: ...
    def drop(self) -> None: ...


def look_up(store: KVStore, names: Sequence[BlockName], first: int) -> Hit:
    """What the tiers have of a request with these blocks, from the place `first` on."""
    if store.windows == (None,):
        return PlainHit(store, names[first:])
    return VerifiedHit(store, names, first)


class PlainHit:
    """With one KV group: blocks that turn out to be lost are computed by vLLM."""

    def __init__(self, store: KVStore, names: Sequence[BlockName]) -> None:
        self._match = store.match_names(names)

    def ready(self) -> bool:
        return self._match.ready()

    def __len__(self) -> int:
        return len(self._match)

    def load(self, tables: Tables) -> Load:
        return self._match.load(tables[0])

    def drop(self) -> None:
        self._match.drop()


class VerifiedHit:
    """With several KV groups, or a window, vLLM cannot compute what is lost.

    So a hit is what host memory holds, where nothing is lost: other tiers' images are brought there
    first, and verified on the way.
    """

    def __init__(self, store: KVStore, names: Sequence[BlockName], first: int) -> None:
        self._store, self._names, self._first = store, names, first
        self._awaited: list[bytes] = []  # keys of images on their way to host memory
        self._deadline = 0.0
        self._is_over = False
        self._match = self._look(None)

    def ready(self) -> bool:
        if self._is_over:
            return True
        if self._awaited:
            return self._is_fetched()
        if not self._match.ready():
            return False
        lacking = self._elsewhere()
        if not lacking:
            return True
        self._store.fetch(*zip(*lacking, strict=True))
        self._awaited = [name.key for name, _ in lacking]
        self._deadline = time.monotonic() + FETCH_S
        return False

    def __len__(self) -> int:
        return 0 if self._is_over else max(0, self._match.hit - self._first)

    def load(self, tables: Tables) -> Load:
        self._match.take_hit(self._is_vllms, self._first + max(map(len, tables)))
        images = self._match.images
        return self._match.load([tables[i.group][i.place - self._first] for i in images])

    def drop(self) -> None:
        if not self._is_over:
            self._match.drop()

    def _look(self, patience: float | None) -> GroupedMatch:
        store, first = self._store, self._first
        return store.match_groups(
            store.windows, self._names, 0, first, self._is_vllms, patience=patience
        )

    def _is_vllms(self, group: int, place: int) -> bool:
        """vLLM's own hit has all that its windows see."""
        return place < self._first

    def _elsewhere(self) -> list[tuple[BlockName, str]]:
        """What the hit needs that is not in host memory, and where it is."""
        places = [image.found.place for image in self._match.images]
        named = zip(self._match.names(), places, strict=True)
        return [(name, place) for name, place in named if place != self._store.host.name]

    def _is_fetched(self) -> bool:
        """Look once more when all is in host memory; what does not come in time is no hit."""
        if all(self._store.host.contains(self._awaited)):
            self._match.drop()
            self._match = self._look(patience=0.0)
            self._awaited = []
            if not self._elsewhere():
                return True
        elif time.monotonic() < self._deadline:
            return False
        self.drop()
        self._is_over = True
        return True
