"""Tiers without bytes: which blocks they hold is up to the real policies, how long a copy takes to
the machine's rates. What goes through one pipe goes one behind the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.kv.block_log import BlockLog, Place, stands_for_chain
from quire.kv.image import BlockName
from quire.kv.policy import Policy


class Pipe:
    """One direction of one tier."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0
        self.num_bytes = 0

    def send(self, num_bytes: int, now: float) -> float:
        """When they will have arrived."""
        self.num_bytes += num_bytes
        self.free_at = max(now, self.free_at) + num_bytes / self.rate
        return self.free_at

    def waiting(self, now: float) -> float:
        """Bytes that have not arrived yet."""
        return max(0.0, self.free_at - now) * self.rate


class PolicyTier:
    """Host memory or a disk: a replica's own, with room for as many blocks as its policy says."""

    def __init__(self, place: Place, policy: Policy[bytes], read: float, write: float) -> None:
        self.place = place
        self.name = str(place.name).lower()
        self.policy = policy
        self._log: BlockLog | None = None
        self.reads = Pipe(read)
        self.writes = Pipe(write)

    def keep(self, names: Sequence[BlockName]) -> None:
        """As many of these as are worth a place."""
        for name in names:
            is_held = self.policy.offer(name.key, name.parent, name.tenant)
            if is_held and self._log is not None and stands_for_chain(name):
                self._log.store(self.place, [name.key])

    def use(self, keys: Sequence[bytes]) -> None:
        self.policy.use(keys)

    def clear(self) -> int:
        raise NotImplementedError("no cache of a simulation is cleared")

    def __contains__(self, key: bytes) -> bool:
        return key in self.policy

    def publish_events(self, log: BlockLog) -> None:
        self._log = log
        self.policy.on_evict = lambda key: log.remove(self.place, [key])


class SharedStore:
    """The blocks of a remote store that all replicas share: the least recently used has to leave,
    as in Redis."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def keep(self, names: Sequence[BlockName]) -> None:
        for name in names:
            self._blocks[name.key] = None
            self._blocks.move_to_end(name.key)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def use(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)


class RemoteTier:
    """A replica's own line to the shared store."""

    name = "remote"

    def __init__(self, store: SharedStore, read: float, write: float) -> None:
        self.store = store
        self.reads = Pipe(read)
        self.writes = Pipe(write)

    def keep(self, names: Sequence[BlockName]) -> None:
        self.store.keep(names)

    def use(self, keys: Sequence[bytes]) -> None:
        self.store.use(keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self.store
