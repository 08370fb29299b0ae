"""From the tiers to the device.

    host memory ───────────────────────────▶ device
    SSD, remote ──▶ a slot of host memory ──▶ device     (and the slot is kept, if it is worth it)

Blocks arrive in pieces and in any order. What counts is how many have arrived from the first on
without a gap: what comes behind a missing block is of no use and is not copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import torch

from quire.kv.image import BlockName
from quire.kv.job_queue import Handle, Job, JobQueue
from quire.kv.pools.block_pool import BlockPool, Blocks, Transfer
from quire.kv.rates import Rates
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.tier import Tier

READ_BYTES = 32 << 20  # read by one job: enough for full speed, little to wait for
COPY_BYTES = 128 << 20  # copied by one job
FEWEST_TIMED = 8  # blocks: what fewer take is the threads' time, not the tier's
SLOT_WAIT_S = 2.0  # for a slot of host memory, while all are on their way somewhere


class Found(NamedTuple):
    """Where a block is: in which tier, and in which slot if that is host memory (held)."""

    place: str
    slot: int = -1


class Item(NamedTuple):
    """One block of a load or a put."""

    at: int  # its place in that
    name: BlockName
    block: Any  # of the device, as the pool knows it
    slot: int = -1  # of host memory


class Load(Handle):
    """Blocks on their way to the device; when it is over, `num_loaded` of them are there.

    With several KV groups there may be several blocks at one place of the chain, and none at
    another. They are counted one group's behind the other's; `arrived` says which are there.
    """

    def __init__(self, count: int, places: Sequence[int] | None = None) -> None:
        """`places`: of the chain, where each block is; without, one behind the other."""
        super().__init__()
        self._places = range(count) if places is None else places
        self._arrived: list[bool | None] = [None] * count
        self._left = count
        # What comes behind the first block that is missing is of no use: with several groups, too,
        # a hit ends before a place where any needed block is missing.
        self._useful = self._all_useful = max(self._places, default=-1) + 1
        self._coming: dict[Transfer, int] = {}  # from host memory, and how many blocks each has
        self._lock = threading.Lock()

    @property
    def arrived(self) -> list[bool]:
        """Whether each block is there."""
        return [bool(there) for there in self._arrived]

    @property
    def num_loaded(self) -> int:
        """Blocks that are there, from the first on without a gap.

        With several KV groups these are images, the first group's first, and no places of the
        chain: there `is_whole` says whether the hit is of use.
        """
        arrived = self._arrived
        return next((i for i, there in enumerate(arrived) if not there), len(arrived))

    @property
    def is_whole(self) -> bool:
        """Whether all of them are there."""
        return all(self._arrived)

    def mark(self, items: Sequence[Item], there: bool) -> None:
        """Record that these blocks have arrived (`there`), or never will."""
        with self._lock:
            for item in items:
                self._arrived[item.at] = there
            self._left -= len(items)
            if items and not there:
                self._useful = min(self._useful, min(self._places[item.at] for item in items))
            is_over = bool(items) and self._left == 0
        if is_over:
            self.end()

    def note_coming(self, transfer: Transfer, count: int) -> None:
        """So many blocks are being copied out of host memory."""
        with self._lock:
            self._coming[transfer] = count

    def note_landed(self, transfer: Transfer) -> None:
        """Before its blocks are marked."""
        with self._lock:
            self._coming.pop(transfer, None)  # loads by layers tell of none

    def last_transfers(self, most: int) -> list[Transfer] | None:
        """Those under way, if they bring all that is left, which is at most so many blocks; None
        if there is more to wait for. What comes out of host memory comes for certain."""
        with self._lock:
            is_last = self._useful == self._all_useful and not self.cancelled
            is_last = is_last and self._left == sum(self._coming.values()) <= most
            return list(self._coming) if is_last else None

    def wants(self, item: Item) -> bool:
        """Whether this block is of use: not cancelled, and no block before it is missing."""
        return not self.cancelled and self._places[item.at] < self._useful


class Loader:
    """Runs loads: a job queue reads each tier, one copies to the device, one waits for copies."""

    def __init__(
        self, pool: BlockPool[Any], host: HostTier, tiers: Sequence[Tier], rates: Rates
    ) -> None:
        self.pool = pool
        self.host = host
        self.rates = rates
        self._read_at_once = max(1, READ_BYTES // host.image_bytes)
        self._copy_at_once = max(1, COPY_BYTES // host.image_bytes)
        self._tiers = {tier.name: tier for tier in tiers}
        self._reads = {tier.name: JobQueue(f"{tier.name} reads", threads=2) for tier in tiers}
        self._copies = JobQueue("copies in")
        self._completions = JobQueue("completions in")

    def start(
        self,
        load: Load,
        names: Sequence[BlockName],
        found: Sequence[Found],
        blocks: Blocks,
    ) -> None:
        """Bring blocks to the device: `names[i]`, which is at `found[i]`, into `blocks[i]`.

        The queues' threads make the items: the caller may be an engine, whose steps wait for it.
        """
        after = self.pool.mark()
        started = time.perf_counter()
        most = {self.host.name: self._copy_at_once}

        def begin(place: str, piece: range) -> None:
            items = [Item(i, names[i], blocks[i], found[i].slot) for i in piece]
            if place == self.host.name:
                or_miss(load, items, partial(self._copy, load, items, place, after, started))()
            else:
                self._read(load, items, self._tiers[place], after, started)

        for place, piece in self._pieces(names, found, most):
            queue = self._copies if place == self.host.name else self._reads[place]
            queue.submit(partial(begin, place, piece))

    def _pieces(
        self, names: Sequence[BlockName], found: Sequence[Found], most: dict[str, int]
    ) -> Iterator[tuple[str, range]]:
        """Neighbours in the same place and of the same group, at most so many at once."""
        places = [each.place for each in found]
        if len(self.pool.image_bytes) == 1:
            yield from _pieces(places, most, self._read_at_once)
            return
        start = 0
        for _, together in groupby(names, key=lambda name: name.group):
            end = start + sum(1 for _ in together)
            for place, piece in _pieces(places[start:end], most, self._read_at_once):
                yield place, range(start + piece.start, start + piece.stop)
            start = end

    def fetch(self, names: Sequence[BlockName], place: str) -> None:
        """Bring blocks of a lower tier into host memory, where a later load finds them."""
        for at in range(0, len(names), self._read_at_once):
            items = [Item(0, name, -1) for name in names[at : at + self._read_at_once]]
            self._reads[place].submit(partial(self._fetch, items, self._tiers[place]))

    def _read(
        self,
        load: Load,
        items: list[Item],
        tier: Tier,
        after: torch.cuda.Event | None,
        started: float,
    ) -> None:
        while items and load.wants(items[0]):
            try:
                good, missed = self._into_slots(items, tier)
            except Exception:
                # Only these: those read before are on their way to the device, and end there.
                load.mark(items, there=False)
                raise
            load.mark(missed, there=False)
            if good:
                copy = partial(self._copy, load, good, tier.name, after, started)
                self._copies.submit(or_miss(load, good, copy))
            items = items[len(good) + len(missed) :]
            if not good:
                break
        load.mark(items, there=False)

    def _fetch(self, items: list[Item], tier: Tier) -> None:
        held = self.host.contains([item.name.key for item in items])
        absent = [item for item, there in zip(items, held, strict=True) if not there]
        while absent:
            good, missed = self._into_slots(absent, tier)
            self._keep(good, tier.name)
            self._release(good)
            absent = absent[len(good) :] if good and not missed else []

    def _into_slots(self, items: list[Item], tier: Tier) -> tuple[list[Item], list[Item]]:
        """Read as many as there are slots for: those that are there now, held, and those missed."""
        slots = self.host.take(len(items), SLOT_WAIT_S)
        wanted = [item._replace(slot=slot) for item, slot in zip(items, slots, strict=False)]
        memory = self.host.memory
        buffers = [memory.buffer(item.slot) for item in wanted]
        try:
            there = tier.read([item.name for item in wanted], buffers)
        except Exception:
            self._release(wanted)
            raise
        good = [item for item, ok in zip(wanted, there, strict=True) if ok]
        missed = [item for item, ok in zip(wanted, there, strict=True) if not ok]
        self._release(missed)
        return good, missed

    def _copy(
        self,
        load: Load,
        items: list[Item],
        place: str,
        after: torch.cuda.Event | None,
        started: float,
    ) -> None:
        useful = list(takewhile(load.wants, items))
        if useful:
            try:
                transfer = self.pool.from_host(
                    self.host.memory.images,
                    [item.slot for item in useful],
                    [item.block for item in useful],
                    after,
                    useful[0].name.group,
                )
            except Exception:
                self._release(items)
                raise
            load.note_coming(transfer, len(useful))
            land = partial(self._land, load, useful, place, transfer, started)
            self._completions.submit(or_miss(load, useful, land))
        others = items[len(useful) :]
        self._release(others)
        load.mark(others, there=False)

    def _land(
        self, load: Load, items: list[Item], place: str, transfer: Transfer, started: float
    ) -> None:
        try:
            transfer.wait()
        finally:
            load.note_landed(transfer)
        if place != self.host.name:
            self._keep(items, place)
        self._release(items)
        # From the start of the load: what came before these blocks delayed them too.
        arrived = items[-1].at + 1
        if arrived >= FEWEST_TIMED:
            self.rates.observe(place, arrived, time.perf_counter() - started)
        size = self.pool.moved_bytes([item.name.group for item in items])
        self.host.counters.reads.add(len(items), size, transfer.seconds)
        load.mark(items, there=True)

    def _keep(self, items: list[Item], place: str) -> None:
        self.host.keep([item.name for item in items], [item.slot for item in items])
        if not self._tiers[place].is_local:
            self.host.note_below(place, [item.name.key for item in items])

    def _release(self, items: list[Item]) -> None:
        self.host.release([item.slot for item in items])

    def withdraw(self, load: Load, gone: Handle) -> None:
        """Cancel a load. When `gone` is over nothing will touch its blocks any more, though a
        slow tier may still be reading for it."""
        load.cancel()
        self._copies.submit(lambda: self._completions.submit(gone.end))

    def leave_device(self, timeout: float) -> bool:
        """Wait until no copy that was begun is under way."""
        return all(queue.catch_up(timeout) for queue in (self._copies, self._completions))

    def close(self, timeout: float) -> bool:
        queues = [*self._reads.values(), self._copies, self._completions]
        return sum(not queue.close(timeout) for queue in queues) == 0


def or_miss(load: Load, items: Sequence[Item], job: Job) -> Job:
    """The job; if it raises, its blocks are a miss: a load must not wait for them for ever."""

    def run() -> None:
        try:
            job()
        except Exception:
            load.mark(items, there=False)
            raise

    return run


def _pieces(
    places: Sequence[str], most: dict[str, int], otherwise: int
) -> Iterator[tuple[str, range]]:
    """Neighbours in the same place, at most so many at once."""
    start = 0
    for at in range(1, len(places) + 1):
        full = at - start == most.get(places[start], otherwise)
        if at == len(places) or places[at] != places[start] or full:
            yield places[start], range(start, at)
            start = at
