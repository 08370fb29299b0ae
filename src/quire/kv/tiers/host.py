"""Host memory: the tier next to the device, and the station on the way to all others.

A slot holds one image. It is taken to be filled, and then either kept, so that others find it by
its key, or given back. A transfer that fills or reads a slot holds it: no other transfer gets it.

    free ── take ──▶ held, no key ── keep ──▶ held, keyed ── release ──▶ keyed ── evict ──▶ free

A few slots more than are ever kept are there for images that only pass through, or that take the
place of another: which, the policy says when they are kept.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kv.block_log import BlockLog, Place, stands_for_chain
from quire.kv.image import BlockName, HeldBlock
from quire.kv.policy import Policy
from quire.kv.policy.refusals import why_turned_away
from quire.kv.policy.timed_pins import TimedPins
from quire.kv.tiers.memory import HostMemory
from quire.kv.tiers.tier import Counters

READY_WAIT_S = 10.0
NOTHING_KEPT = "host_cache_bytes is 0"


class HostTier:
    """As many images found by key as the policy has room for, in a few more slots of memory."""

    name = "host"

    def __init__(self, memory: HostMemory, policy: Policy[bytes]) -> None:
        self.memory = memory
        self.policy = policy
        self.policy.on_evict = self._evict
        self.counters = Counters()
        self._slots: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._names: dict[bytes, BlockName] = {}
        self._below: dict[str, set[bytes]] = {}  # by far tier: what is here and known to be there
        self._pinned = TimedPins(policy)
        self._kept = bytearray(memory.num_slots)  # by slot: 1 if it has a key
        self._held: dict[int, int] = {}  # how often; a Counter takes twice as long
        self._free: deque[int] = deque()
        self._changed = threading.Condition()
        self._log: BlockLog | None = None
        memory.make_ready(self._add_free)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def capacity(self) -> int:
        return self.policy.capacity

    @property
    def image_bytes(self) -> int:
        return self.memory.image_bytes

    def publish_events(self, log: BlockLog) -> None:
        """From now on; and what is held already."""
        with self._changed:
            self._log = log
            log.store(Place.HOST, self._slots)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        slots = self._slots
        return [key in slots for key in keys]

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """As `all(contains(keys))`, in less time: every put of what is here already asks it."""
        return all(map(self._slots.__contains__, keys))

    def use(self, keys: Sequence[bytes]) -> None:
        with self._changed:
            self.policy.use(keys)

    def hold(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of these images, up to the first that is not here; no other transfer gets
        them until they are released."""
        with self._changed:
            slots = []
            for key in keys:
                slot = self._slots.get(key)
                if slot is None:
                    break
                slots.append(slot)
            self._hold(slots)
            return slots

    def hold_each(self, keys: Sequence[bytes]) -> list[int | None]:
        """As `hold`, but beyond those that are not here: None for each of them."""
        with self._changed:
            slots = [self._slots.get(key) for key in keys]
            self._hold([slot for slot in slots if slot is not None])
            return slots

    def note_below(self, tier: str, keys: Sequence[bytes]) -> None:
        """This tier has these: as long as they are here, it need not be asked for them again."""
        with self._changed:
            self._below.setdefault(tier, set()).update(key for key in keys if key in self._slots)

    def known_below(self, tier: str, keys: Sequence[bytes]) -> list[bool]:
        """Whether this tier has had each of them since it came here."""
        known = self._below.get(tier, ())
        return [key in known for key in keys]

    def hold_slots(self, slots: Sequence[int]) -> None:
        """Hold once more, for another transfer, slots that are held already."""
        with self._changed:
            self._hold(slots)

    def take(self, count: int, timeout: float = 0.0) -> list[int]:
        """Slots to be filled, up to `count`; none if all are held for longer than `timeout`.

        While the memory itself is still being made ready, that is waited for.
        """
        deadline = time.monotonic() + (timeout if self.memory.is_ready else READY_WAIT_S)
        with self._changed:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    self.counters.drop("no slot free", count)
                    return []
            slots = [self._free.popleft() for _ in range(min(count, len(self._free)))]
            self._hold(slots)
            return slots

    def keep(self, names: Sequence[BlockName], slots: Sequence[int]) -> list[bool]:
        """Filled slots that are held: let others find those that are worth a place.

        Returns for each whether its image is found from now on, in this slot or another.
        """
        with self._changed:
            self._pinned.expire()
            for name, slot in zip(names, slots, strict=True):
                if name.key in self._slots:
                    continue
                if self.policy.offer(name.key, name.parent, name.tenant):
                    self._slots[name.key] = slot
                    self._names[name.key] = name
                    self._keys[slot] = name.key
                    self._kept[slot] = 1
                    self.policy.pin(name.key)
                    if self._log is not None and stands_for_chain(name):
                        self._log.store(Place.HOST, [name.key])
            self._changed.notify_all()
            return [name.key in self._slots for name in names]

    def why_not_kept(self, name: BlockName, came_with: Sequence[int]) -> str:
        """What kept a block out that was just to be kept, with those in these slots."""
        if not self.policy.capacity:
            return NOTHING_KEPT
        with self._changed:
            in_use = len((self._held.keys() & self._keys.keys()) - set(came_with))
            return why_turned_away(self.policy, name.tenant, in_use)

    def release(self, slots: Sequence[int]) -> None:
        with self._changed:
            for slot in slots:
                held = self._held[slot] - 1
                assert held >= 0, f"slot {slot} was released more often than it was taken"
                if held:
                    self._held[slot] = held
                else:
                    del self._held[slot]
                    if slot in self._keys:
                        self.policy.unpin(self._keys[slot])
                    else:
                        self._free.append(slot)
            self._changed.notify_all()

    def _add_free(self, slots: range) -> None:
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def _hold(self, slots: Sequence[int]) -> None:
        held, keys, pin = self._held, self._keys, self.policy.pin
        for slot in slots:
            count = held.get(slot, 0)
            if not count and slot in keys:
                pin(keys[slot])
            held[slot] = count + 1

    def _evict(self, key: bytes) -> None:
        self._forget(key)
        self.counters.drop("evicted")

    def _forget(self, key: bytes) -> None:
        slot = self._slots.pop(key)
        del self._keys[slot], self._names[key]
        for known in self._below.values():
            known.discard(key)
        self._kept[slot] = 0
        if slot not in self._held:
            self._free.append(slot)
        if self._log is not None:
            self._log.remove(Place.HOST, [key])

    def clear(self) -> int:
        """Forget every image that no transfer holds; returns how many there were."""
        with self._changed:
            unheld = [key for key, slot in self._slots.items() if slot not in self._held]
            for key in unheld:
                self._pinned.forget(key)
                self.policy.remove(key)
                self._forget(key)
            return len(unheld)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget these; a slot that a transfer holds is free when that is over.

        Returns how many of them there were.
        """
        with self._changed:
            here = [key for key in dict.fromkeys(keys) if key in self._slots]
            for key in here:
                slot = self._slots[key]
                if slot in self._held:
                    self.policy.unpin(key)
                self._pinned.forget(key)
                self.policy.remove(key)
                self._forget(key)
            return len(here)

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """Do not evict these for so long; how many of them are here and stay."""
        with self._changed:
            return self._pinned.pin([key for key in keys if key in self._slots], seconds)

    def held(self) -> list[HeldBlock]:
        with self._changed:
            names = list(self._names.values())
        return [HeldBlock(name.key, name.parent, name.root, name.tenant) for name in names]

    def blocks_by_root(self) -> dict[str, int]:
        return dict(Counter(block.root[:8].hex() for block in self.held()))

    def slot_states(self) -> npt.NDArray[np.uint8]:
        """For each slot 0 free, 1 kept, 2 held: it is being filled or read."""
        with self._changed:
            states = np.frombuffer(bytes(self._kept), dtype=np.uint8).copy()
            states[list(self._held)] = 2
        return states

    def stats(self) -> dict[str, Any]:
        with self._changed:
            used = {"capacity": self.capacity, "used": len(self._slots), "held": len(self._held)}
        return {**used, "bytes": self.memory.nbytes, **self.counters.as_dict()}
