"""What is where, in memory: blocks by key, free slots, and the slots that nobody may take now.

A slot is in one of four states:

    free      its record is clear; the next write takes it
    held      `places` finds it by its block's key
    taken     a write is under way into it: nobody else knows it
    dropped   its block was bad, but it is still being read: free when the last reader is done

A place is a slot of one of the volumes as one number, `slot * volumes + volume`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.kv.image import BlockName
from quire.kv.tiers.ssd.lru import Policy
from quire.kv.tiers.ssd.records import Held


class Pin(NamedTuple):
    """A block that is being read, and where."""

    key: bytes
    place: int


class Taken(NamedTuple):
    """A place to write a block to."""

    place: int
    was_held: bool  # its record is still set and has to be cleared first


class Catalog:
    """Thread-safe. It knows nothing of files: whoever takes a slot clears its record."""

    def __init__(self, volumes: int, policy: Policy) -> None:
        self.places: dict[bytes, int] = {}
        self.evicted = 0
        self._policy = policy
        self._free: list[deque[int]] = [deque() for _ in range(volumes)]
        self._kept = [bytearray() for _ in range(volumes)]  # by slot: 1 if `places` finds it
        self._gone: set[int] = set()  # volumes that have failed
        self._turn = 0
        self._readers: Counter[Pin] = Counter()
        self._dropped: set[int] = set()
        self._being_written: set[bytes] = set()
        self._lock = threading.Lock()

    def add_volume(self, volume: int, slots: int, held: Held) -> None:
        """At the start: what was found, the least recently used first."""
        is_free = np.ones(slots, dtype=np.bool_)
        is_free[held.slots] = False
        self._free[volume].extend(np.flatnonzero(is_free).tolist())
        self._kept[volume] = bytearray((~is_free).tobytes())
        places = held.slots * len(self._free) + volume
        keys = held.keys()
        self.places.update(zip(keys, places.tolist(), strict=True))
        add = self._policy.add  # a million times, perhaps
        for key, parent in zip(keys, held.parents(), strict=True):
            add(key, parent)

    def remove_volume(self, volume: int) -> int:
        """It has failed; returns how many blocks it held."""
        with self._lock:
            if volume in self._gone:
                return 0
            self._gone.add(volume)
            self._free[volume].clear()
            self._kept[volume] = bytearray()
            lost = [key for key, place in self.places.items() if self.slot(place)[0] == volume]
            for key in lost:
                self._forget(key)
            return len(lost)

    def slot_states(self) -> npt.NDArray[np.uint8]:
        """For each slot, volume by volume: 0 free, 1 held, 2 held and being read."""
        with self._lock:
            states = [np.frombuffer(bytes(kept), dtype=np.uint8).copy() for kept in self._kept]
            for volume, slot in (self.slot(pin.place) for pin in self._readers):
                if volume not in self._gone:
                    states[volume][slot] = 2
        return np.concatenate(states)

    def slot(self, place: int) -> tuple[int, int]:
        """The volume and the slot in it."""
        slot, volume = divmod(place, len(self._free))
        return volume, slot

    def use(self, keys: Sequence[bytes]) -> list[int]:
        """Tell the policy; returns the places of those that are held."""
        with self._lock:
            self._policy.use(keys)
            return [self.places[key] for key in keys if key in self.places]

    # Reading: what `pin` returned is not overwritten until `unpin`.

    def pin(self, keys: Sequence[bytes]) -> list[Pin | None]:
        with self._lock:
            pins = [Pin(key, self.places[key]) if key in self.places else None for key in keys]
            self._readers.update(pin for pin in pins if pin)
            return pins

    def unpin(self, pins: Iterable[Pin | None]) -> None:
        with self._lock:
            for pin in filter(None, pins):
                self._readers[pin] -= 1
                if not self._readers[pin]:
                    del self._readers[pin]
                    if pin.place in self._dropped:
                        self._dropped.remove(pin.place)
                        self._release(pin.place)

    def drop(self, pin: Pin) -> bool:
        """The block is bad: forget it. False if another reader was quicker."""
        with self._lock:
            if self.places.get(pin.key) != pin.place:
                return False
            self._forget(pin.key)
            self._dropped.add(pin.place)
            return True

    def lose(self, place: int) -> None:
        """The record of a dropped block could not be cleared, so its slot is never to be used."""
        with self._lock:
            self._dropped.discard(place)

    # Writing: a place that `take` returned is the caller's until `keep` or `give_back`.

    def take(self, names: Sequence[BlockName]) -> list[Taken | None]:
        """None for a block that is held, that another thread is writing, or that must stay out."""
        with self._lock:
            pinned = {pin.key for pin in self._readers}
            pinned.update(name.key for name in names)
            return [self._take(name, pinned) for name in names]

    def keep(self, name: BlockName, place: int) -> None:
        """The block is written: it can be found from now on."""
        with self._lock:
            self._being_written.discard(name.key)
            if self.slot(place)[0] not in self._gone:
                self.places[name.key] = place
                self._mark(place, 1)
                self._policy.add(name.key, name.parent)

    def give_back(self, name: BlockName, place: int, *, usable: bool) -> None:
        """The block was not written; a place whose record could not be cleared is lost."""
        with self._lock:
            self._being_written.discard(name.key)
            if usable:
                self._release(place)

    def _take(self, name: BlockName, pinned: set[bytes]) -> Taken | None:
        if name.key in self.places or name.key in self._being_written:
            return None
        taken = self._free_place() or self._evict(name, pinned)
        if taken:
            self._being_written.add(name.key)
        return taken

    def _free_place(self) -> Taken | None:
        """From each volume in its turn, so that a prompt is read from all of them at once."""
        volumes = len(self._free)
        for volume in (*range(self._turn, volumes), *range(self._turn)):
            if self._free[volume]:
                self._turn = (volume + 1) % volumes
                return Taken(self._free[volume].popleft() * volumes + volume, was_held=False)
        return None

    def _evict(self, name: BlockName, pinned: set[bytes]) -> Taken | None:
        if not self._policy.admit(name.key, name.parent):
            return None
        victim = self._policy.victim(pinned)
        if victim is None:
            return None
        self.evicted += 1
        return Taken(self._forget(victim), was_held=True)

    def _forget(self, key: bytes) -> int:
        self._policy.remove(key)
        place = self.places.pop(key)
        self._mark(place, 0)
        return place

    def _mark(self, place: int, kept: int) -> None:
        volume, slot = self.slot(place)
        if volume not in self._gone:
            self._kept[volume][slot] = kept

    def _release(self, place: int) -> None:
        volume, slot = self.slot(place)
        if volume not in self._gone:
            self._free[volume].append(slot)
