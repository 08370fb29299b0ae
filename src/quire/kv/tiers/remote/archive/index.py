"""Which pack has which block, as far as this process knows: from names, in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from quire.kv.tiers.remote.archive.pack import Span, packed_bytes, read_name


class PackIndex:
    """Shared by threads. Other machines write packs, too: a listing brings what they did."""

    def __init__(self) -> None:
        self._packs: dict[int, tuple[str, ...]] = {}  # by key: those that have it
        self._names: set[str] = set()
        self._bad: dict[str, set[int]] = {}  # by pack: those that are not what they should be
        self._added: set[str] = set()  # since the last listing began, which may not have seen them
        self._gone: set[str] = set()  # since then, which it may still have seen
        self._lock = threading.Lock()
        self.total_bytes = 0

    def __len__(self) -> int:
        """Blocks."""
        return len(self._packs)

    def find(self, keys: Sequence[int]) -> list[str | None]:
        """A pack for each key, or None."""
        with self._lock:
            return [packs[-1] if (packs := self._packs.get(key)) else None for key in keys]

    def has(self, name: str) -> bool:
        """Whether this pack is there, with nothing wrong in it."""
        with self._lock:
            return name in self._names and name not in self._bad

    def lists(self, name: str) -> bool:
        """Whether this pack is there, whatever is wrong in it."""
        with self._lock:
            return name in self._names

    def packs(self) -> list[str]:
        with self._lock:
            return list(self._names)

    def add(self, name: str) -> None:
        """A pack that was just written: what was wrong with one of this name is mended."""
        with self._lock:
            self._added.add(name)
            self._gone.discard(name)
            for key in self._bad.pop(name, ()):
                self._packs[key] = (*self._packs.get(key, ()), name)
            self._add(name)

    def discard(self, name: str) -> None:
        """A pack that is no longer there."""
        with self._lock:
            self._gone.add(name)
            self._added.discard(name)
            self._discard(name)

    def mark_bad(self, name: str, key: int) -> None:
        """Do not find this block in this pack any more."""
        with self._lock:
            if name in self._names:
                self._bad.setdefault(name, set()).add(key)
                self._take_away(key, name)

    def good_of_bad(self, name: str) -> dict[int, Span] | None:
        """What is not known to be wrong in a pack in which something is; None of any other."""
        with self._lock:
            if name not in self._names or name not in self._bad:
                return None
            spans, bad = read_name(name) or {}, self._bad[name]
            return {key: span for key, span in spans.items() if key not in bad}

    def begin_listing(self) -> None:
        with self._lock:
            self._added.clear()
            self._gone.clear()

    def end_listing(self, listed: Iterable[str]) -> None:
        """These packs are there, but for those that went in the meantime, and what was added."""
        there = set(listed)
        with self._lock:
            there -= self._gone
            for name in self._names - there - self._added:
                self._discard(name)
            for name in there - self._names:
                self._add(name)

    def _add(self, name: str) -> None:
        if name in self._names or not (spans := read_name(name)):
            return
        self._names.add(name)
        self.total_bytes += packed_bytes(name)
        for key in spans:
            self._packs[key] = (*self._packs.get(key, ()), name)

    def _discard(self, name: str) -> None:
        if name not in self._names:
            return
        self._names.remove(name)
        self._bad.pop(name, None)
        self.total_bytes -= packed_bytes(name)
        for key in read_name(name) or ():
            self._take_away(key, name)

    def _take_away(self, key: int, name: str) -> None:
        packs = tuple(pack for pack in self._packs.get(key, ()) if pack != name)
        if packs:
            self._packs[key] = packs
        else:
            self._packs.pop(key, None)
