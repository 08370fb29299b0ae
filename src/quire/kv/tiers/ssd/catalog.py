"""What is where, in memory: blocks by key, free slots, and the slots that may not be taken now.

A slot is in one of four states:

    free      its record is clear; the next write takes it
    held      `places` finds it by its block's key
    taken     a write is under way into it: no look-up finds it
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

from quire.kv.block_log import BlockLog, Place, stands_for_chain
from quire.kv.image import BlockName
from quire.kv.policy import Policy
from quire.kv.policy.refusals import why_turned_away
from quire.kv.policy.timed_pins import TimedPins
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
    """Thread-safe. It knows nothing of files: the caller that takes a slot clears its record.

    Its policy knows the blocks that are held and those that are being written, which are pinned.
    """

    def __init__(self, volumes: int, policy: Policy[bytes]) -> None:
        self.places: dict[bytes, int] = {}
        self.evicted = 0
        self._policy = policy
        self._pinned = TimedPins(policy)
        self._policy.capacity = 0  # until there are volumes
        self._policy.on_evict = self._evict
        self._evicted: list[int] = []  # places for the next writes, with records still set
        self._free: list[deque[int]] = [deque() for _ in range(volumes)]
        self._kept = [bytearray() for _ in range(volumes)]  # by slot: 1 if `places` finds it
        self._gone: set[int] = set()  # volumes that have failed
        self._turn = 0
        self._readers: Counter[Pin] = Counter()
        self._dropped: set[int] = set()
        self._being_written: set[bytes] = set()
        self._log: BlockLog | None = None
        self._lock = threading.Lock()

    def add_volume(self, volume: int, slots: int, held: Held) -> None:
        """At the start: a folder and what was found in it."""
        is_free = np.ones(slots, dtype=np.bool_)
        is_free[held.slots] = False
        self._free[volume].extend(np.flatnonzero(is_free).tolist())
        self._kept[volume] = bytearray((~is_free).tobytes())
        places = held.slots * len(self._free) + volume
        self.places.update(zip(held.keys(), places.tolist(), strict=True))
        self._policy.capacity += slots

    def restore(self, found: list[Held]) -> list[int]:
        """When all volumes are there: tell the policy of the blocks that were found in them.

        Returns the places of those that have to leave, because of a tenant's quota. They are free
        when their records are cleared, and `free` says so.
        """
        held = Held.joined(found)
        self._policy.restore(held.keys(), held.parents(), held.tenants())
        places, self._evicted = self._evicted, []
        return places

    def publish_events(self, log: BlockLog) -> None:
        """From now on; and what is held already."""
        with self._lock:
            self._log = log
            log.store(Place.SSD, self.places)

    def free(self, place: int, *, usable: bool) -> None:
        if usable:
            self._release(place)
        else:
            self._lose(place)

    def remove_volume(self, volume: int) -> int:
        """It has failed; returns how many blocks it held."""
        with self._lock:
            if volume in self._gone:
                return 0
            self._gone.add(volume)
            self._kept[volume] = bytearray()
            lost = [key for key, place in self.places.items() if self.slot(place)[0] == volume]
            for key in lost:
                self._forget(key)
            evicted = [place for place in self._evicted if self.slot(place)[0] == volume]
            self._evicted = [place for place in self._evicted if place not in evicted]
            self._policy.capacity -= len(lost) + len(evicted) + len(self._free[volume])
            self._free[volume].clear()
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

    def pin_for(self, keys: Sequence[bytes], seconds: float) -> int:
        """Do not evict these for so long; how many of them are held and stay."""
        with self._lock:
            return self._pinned.pin([key for key in keys if key in self.places], seconds)

    # Reading: what `pin` returned is not overwritten until `unpin`.

    def pin(self, keys: Sequence[bytes]) -> list[Pin | None]:
        with self._lock:
            pins = [Pin(key, self.places[key]) if key in self.places else None for key in keys]
            for pin in filter(None, pins):
                self._readers[pin] += 1
                self._policy.pin(pin.key)
            return pins

    def unpin(self, pins: Iterable[Pin | None]) -> None:
        with self._lock:
            for pin in filter(None, pins):
                self._policy.unpin(pin.key)
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
            if place in self._dropped:
                self._dropped.remove(place)
                self._lose(place)

    # Writing: a place that `take` returned is the caller's until `keep` or `give_back`.

    def take(self, names: Sequence[BlockName]) -> list[Taken | None]:
        """None for a block that is held, that another thread is writing, or that must stay out."""
        with self._lock:
            self._pinned.expire()
            return [self._take(name) for name in names]

    def why_turned_away(self, name: BlockName) -> str:
        with self._lock:
            in_use = len(self._being_written | {pin.key for pin in self._readers})
            return why_turned_away(self._policy, name.tenant, in_use)

    def keep(self, name: BlockName, place: int) -> None:
        """The block is written: it can be found from now on."""
        with self._lock:
            self._being_written.discard(name.key)
            self._policy.unpin(name.key)
            if self.slot(place)[0] not in self._gone:
                self.places[name.key] = place
                self._mark(place, 1)
                if self._log is not None and stands_for_chain(name):
                    self._log.store(Place.SSD, [name.key])
            else:
                self._policy.remove(name.key)
                self._policy.capacity -= 1

    def give_back(self, name: BlockName, place: int, *, usable: bool) -> None:
        """The block was not written; a place whose record could not be cleared is lost."""
        with self._lock:
            self._being_written.discard(name.key)
            self._policy.unpin(name.key)
            self._policy.remove(name.key)
            self.free(place, usable=usable)

    def _take(self, name: BlockName) -> Taken | None:
        if name.key in self.places or name.key in self._being_written:
            return None
        if not self._policy.offer(name.key, name.parent, name.tenant):
            return None
        taken = self._evicted_or_free_place()
        if taken is None:  # what is left of the room is waiting for its last reader
            self._policy.remove(name.key)
            return None
        self._policy.pin(name.key)
        self._being_written.add(name.key)
        return taken

    def _evict(self, key: bytes) -> None:
        """The policy gives this block up, most often for the one that is offered to it."""
        self.evicted += 1
        self._evicted.append(self._take_out(key))

    def _evicted_or_free_place(self) -> Taken | None:
        """Free ones from each volume in its turn: then a prompt is read from all of them at once"""
        if self._evicted:
            return Taken(self._evicted.pop(), was_held=True)
        volumes = len(self._free)
        for volume in (*range(self._turn, volumes), *range(self._turn)):
            if self._free[volume]:
                self._turn = (volume + 1) % volumes
                return Taken(self._free[volume].popleft() * volumes + volume, was_held=False)
        return None

    def _forget(self, key: bytes) -> int:
        self._pinned.forget(key)
        self._policy.remove(key)
        return self._take_out(key)

    def _take_out(self, key: bytes) -> int:
        """It cannot be found any more; returns its place."""
        place = self.places.pop(key)
        self._mark(place, 0)
        if self._log is not None:
            self._log.remove(Place.SSD, [key])
        return place

    def _mark(self, place: int, kept: int) -> None:
        volume, slot = self.slot(place)
        if volume not in self._gone:
            self._kept[volume][slot] = kept

    def _release(self, place: int) -> None:
        volume, slot = self.slot(place)
        if volume in self._gone:
            self._policy.capacity -= 1
        else:
            self._free[volume].append(slot)

    def _lose(self, place: int) -> None:
        self._policy.capacity -= 1
