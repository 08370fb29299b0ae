"""From the device to the tiers: into a slot of host memory, and from there into each tier below.

The device's blocks are free again as soon as they are copied. Slower tiers take their time: they
read the slot, which is held for them; with too much waiting to be written, new images are left out.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from quire.errors import KVError
from quire.kv.foreground import Foreground
from quire.kv.image import BlockName
from quire.kv.job_queue import Handle, JobQueue, OpenHandles
from quire.kv.loads import Item, Load
from quire.kv.pools.block_pool import BlockPool, Blocks, Transfer
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.tier import Tier

# Of blocks that are put. The thread that copies calls the latter, so that no step waits for it.
Names = Sequence[BlockName] | Callable[[], Sequence[BlockName]]

PIECE_BYTES = 32 << 20
MOST_WAITING = 64  # jobs, for one tier
SLOT_WAIT_S = 1.0  # for a slot of host memory, while all wait to be written
# How long each piece waits for loads to end: a request waits for a load, and the GPU computes more
# slowly while both directions are busy.
LOADS_FIRST_S = 0.005

# Why a tier does not hold a block that was put.
NO_SLOT = "no slot free"
TOO_MUCH = "too much waiting to be written"
TURNED_AWAY = "no room, or the tier could not write it"  # which, the tier does not say
CANCELLED = "cancelled"
FAILED = "the copy failed; the log has the reason"


class Write(Handle):
    """Images that are being written to a tier below host memory."""


class Put(Handle):
    """Blocks that are being copied off the device; when it is over they may be written again.

    Lower tiers take their time: `wait_until_kept` waits for them, too. What became of the blocks is
    then known: `kept` and `num_kept` say which tiers hold them, `refused` why others do not.
    """

    def __init__(self, num_blocks: int = 0, tiers: Sequence[str] = ()) -> None:
        """`tiers`: the names of those that the store has."""
        super().__init__()
        self.num_blocks = num_blocks
        self._tiers = tiers
        self.refused: Counter[tuple[str, str]] = Counter()  # blocks, by tier and reason
        self.writes: list[Write] = []  # all of them, once the put is over
        self._kept: dict[str, bytearray] = {}  # by tier: 1 for each block that it holds

    def kept(self, tier: str | None = None) -> list[bool]:
        """Whether this tier, or any, holds each block."""
        if tier is not None and tier not in self._tiers:
            raise KVError(f"This store has {', '.join(self._tiers)}, and no tier {tier!r}.")
        wanted = [flags for name, flags in self._kept.items() if tier in (None, name)]
        return [any(flags) for flags in zip(*wanted, strict=True)] or [False] * self.num_blocks

    @property
    def num_kept(self) -> int:
        """Blocks that some tier holds."""
        return sum(self.kept())

    def wait_until_kept(self, timeout: float | None = None) -> bool:
        """Wait until every tier has taken or refused every block; False if that takes longer."""
        until = None if timeout is None else time.monotonic() + timeout
        return self.wait(timeout) and all(
            write.wait(None if until is None else max(0.0, until - time.monotonic()))
            for write in self.writes
        )

    def note_held(self, tier: str, held: Sequence[bool]) -> None:
        """What a tier holds of it before it begins."""
        self._kept[tier] = bytearray(held)

    def note_everywhere(self, tiers: Sequence[str]) -> None:
        """These tiers hold all of it."""
        self._kept = {tier: bytearray(b"\1") * self.num_blocks for tier in tiers}

    def note(self, tier: str, places: Sequence[int], held: Sequence[bool], otherwise: str) -> None:
        """A tier holds these blocks of the put, or refused them."""
        flags = self._kept.setdefault(tier, bytearray(self.num_blocks))
        for at, is_held in zip(places, held, strict=True):
            flags[at] = is_held
        if num_refused := len(places) - sum(held):
            self.refused[tier, otherwise] += num_refused


class _Waiting(NamedTuple):
    """What one put has for a tier."""

    put: Put
    write: Write
    items: list[Item]


class Putter:
    """Runs puts: a job queue copies off the device, one waits for copies, one writes each tier."""

    def __init__(
        self,
        pool: BlockPool[Any],
        host: HostTier,
        tiers: Sequence[Tier],
        handles: OpenHandles,
        foreground: Foreground,
    ) -> None:
        self.pool = pool
        self.host = host
        self.tiers = tiers
        self.handles = handles
        self.foreground = foreground
        self.piece = max(1, PIECE_BYTES // host.image_bytes)
        self._copies = JobQueue("copies out")
        self._completions = JobQueue("completions out")
        self._waiting: dict[str, deque[_Waiting]] = {tier.name: deque() for tier in tiers}
        self._writes = {tier.name: JobQueue(f"{tier.name} writes") for tier in tiers}

    def note_if_everywhere(self, put: Put, names: Sequence[BlockName]) -> bool:
        """Whether every tier is known to have all of these, so that there is nothing to do."""
        keys = [name.key for name in names]
        if not self.host.has_all(keys):
            return False
        for tier in self.tiers:
            if not all(self._known_in(tier, keys)):
                return False
        put.note_everywhere([self.host.name, *self._writes])
        return True

    def start(self, put: Put, names: Names, blocks: Blocks, after: torch.cuda.Event | None) -> None:
        self._copies.submit(partial(self._copy_new, put, names, blocks, after))

    def _copy_new(
        self, put: Put, names: Names, blocks: Blocks, after: torch.cuda.Event | None
    ) -> None:
        """Those that host memory has not; others may have brought some since they were put.

        Of those that it has, tiers below get what they lack.
        """
        try:
            self.foreground.give_way()
            named = names() if callable(names) else names
            if self.note_if_everywhere(put, named):
                return
            held = self.host.contains([name.key for name in named])
            here = [Item(i, named[i], blocks[i]) for i, there in enumerate(held) if there]
            if here:
                for item in self._offer_below(put, here):
                    held[item.at] = False
            put.note_held(self.host.name, held)
            new = [Item(i, named[i], blocks[i]) for i, there in enumerate(held) if not there]
            pieces = self._pieces(new)
            try:
                for piece in pieces:
                    self._copy(put, piece, after)
            except Exception:
                for piece in pieces:  # those behind the one that failed
                    self._refuse(put, piece, FAILED)
                raise
        finally:
            # The other queue does one job after the other, so this is behind all of its copies.
            self._completions.submit(put.end)

    def _offer_below(self, put: Put, items: Sequence[Item]) -> list[Item]:
        """Give each tier what it lacks of these, out of host memory, where they are.

        Returns those that have been evicted there in the meantime.
        """
        lacking = {tier.name: self._lacking(put, tier, items) for tier in self.tiers}
        wanted = {item.at: item for lacks in lacking.values() for item in lacks}
        slots = self.host.hold_each([item.name.key for item in wanted.values()])
        found = {at: slot for at, slot in zip(wanted, slots, strict=True) if slot is not None}
        try:
            for tier in self.tiers:
                lacks = lacking[tier.name]
                here = [item._replace(slot=found[item.at]) for item in lacks if item.at in found]
                for first in range(0, len(here), self.piece):
                    self._begin_to_write(put, tier, here[first : first + self.piece])
        finally:
            self.host.release(list(found.values()))
        return [item for at, item in wanted.items() if at not in found]

    def _lacking(self, put: Put, tier: Tier, items: Sequence[Item]) -> list[Item]:
        """Those that a tier is not known to have; of the others the put is told."""
        known = self._known_in(tier, [item.name.key for item in items])
        there = [item.at for item, is_held in zip(items, known, strict=True) if is_held]
        put.note(tier.name, there, [True] * len(there), "")
        lacks = [item for item, is_held in zip(items, known, strict=True) if not is_held]
        if put.cancelled:
            put.note(tier.name, [item.at for item in lacks], [False] * len(lacks), CANCELLED)
            return []
        return lacks

    def _known_in(self, tier: Tier, keys: Sequence[bytes]) -> list[bool]:
        """Whether a tier has these, as far as can be said without asking one that is far away."""
        if tier.is_local:
            return tier.contains(keys)
        return self.host.known_below(tier.name, keys)

    def _pieces(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """So many at once, and of one KV group."""
        num_groups = len(self.pool.image_bytes)
        for group in range(num_groups):
            of_group = [i for i in items if i.name.group == group] if num_groups > 1 else items
            for at in range(0, len(of_group), self.piece):
                yield of_group[at : at + self.piece]

    def _copy(self, put: Put, items: Sequence[Item], after: torch.cuda.Event | None) -> None:
        memory, group = self.host.memory, items[0].name.group
        while items and not put.cancelled:
            self.handles.wait_for_all(LOADS_FIRST_S, Load)
            self.foreground.give_way()
            slots = self.host.take(len(items), SLOT_WAIT_S)
            if not slots:
                # All slots wait for a slow tier: the rest would wait as long.
                self._refuse(put, items, NO_SLOT)
                put.cancel()
                return
            if put.cancelled:  # meanwhile: the store may be closed by now
                self.host.release(slots)
                break
            taken = [i._replace(slot=slot) for i, slot in zip(items, slots, strict=False)]
            blocks = [item.block for item in taken]
            try:
                transfer = self.pool.to_host(blocks, memory.images, slots, after, group)
            except Exception:
                self.host.release(slots)
                self._refuse(put, items, FAILED)
                raise
            self._completions.submit(partial(self._arrive, put, taken, transfer))
            items = items[len(slots) :]
        self._refuse(put, items, CANCELLED)

    def _refuse(self, put: Put, items: Sequence[Item], reason: str) -> None:
        """None of these gets as far as host memory, through which all tiers are reached."""
        put.note(self.host.name, [item.at for item in items], [False] * len(items), reason)

    def _arrive(self, put: Put, items: list[Item], transfer: Transfer) -> None:
        slots = [item.slot for item in items]
        try:
            transfer.wait()
            self.foreground.give_way()
            size = self.pool.moved_bytes([item.name.group for item in items])
            self.host.counters.writes.add(len(items), size, transfer.seconds)
            held = self.host.keep([item.name for item in items], slots)
            reason = ""
            if not all(held):
                reason = self.host.why_not_kept(items[held.index(False)].name, slots)
            put.note(self.host.name, [item.at for item in items], held, reason)
            for tier in self.tiers:
                self._begin_to_write(put, tier, items)
        except Exception:
            self._refuse(put, items, FAILED)
            raise
        finally:
            self.host.release(slots)

    def _begin_to_write(self, put: Put, tier: Tier, items: list[Item]) -> None:
        """From slots that are held until they are written."""
        queue = self._writes[tier.name]
        if queue.backlog >= MOST_WAITING:
            tier.counters.drop(TOO_MUCH, len(items))
            put.note(tier.name, [item.at for item in items], [False] * len(items), TOO_MUCH)
            return
        self.host.hold_slots([item.slot for item in items])
        write = Write()
        self.handles.follow(write)
        put.writes.append(write)
        self._waiting[tier.name].append(_Waiting(put, write, items))
        queue.submit(partial(self._write_waiting, tier))

    def _write_waiting(self, tier: Tier) -> None:
        """Of what waits as much as a piece: what many puts brought meanwhile is one write.

        So decodes, which bring a block at a time, do not leave small objects in a slow store.
        """
        waiting, batch, size = self._waiting[tier.name], list[_Waiting](), 0
        while waiting and (not batch or size + len(waiting[0].items) <= self.piece):
            batch.append(waiting.popleft())
            size += len(batch[-1].items)
        if batch:
            self._write(tier, batch)

    def _write(self, tier: Tier, batch: Sequence[_Waiting]) -> None:
        items = [item for each in batch for item in each.items]
        wanted = [not each.write.cancelled for each in batch for _ in each.items]
        held, turned_away = [False] * len(items), FAILED
        try:
            held = tier.contains([item.name.key for item in items])
            new = [at for at, there in enumerate(held) if wanted[at] and not there]
            if new:
                images = [self.host.memory.buffer(items[at].slot) for at in new]
                written = tier.write([items[at].name for at in new], images)
                for at, is_held in zip(new, written, strict=True):
                    held[at] = is_held
            if not tier.is_local:
                taken = [i.name.key for i, there in zip(items, held, strict=True) if there]
                self.host.note_below(tier.name, taken)
            turned_away = tier.refusal or TURNED_AWAY
        finally:
            self.host.release([item.slot for item in items])
            at = 0
            for put, write, own in batch:
                reason = turned_away if wanted[at] else CANCELLED
                put.note(tier.name, [i.at for i in own], held[at : at + len(own)], reason)
                write.end()
                at += len(own)

    def leave_device(self, timeout: float) -> bool:
        """Wait until no copy that was begun is under way."""
        return all(queue.catch_up(timeout) for queue in (self._copies, self._completions))

    def close(self, timeout: float) -> bool:
        queues = [self._copies, self._completions, *self._writes.values()]
        return sum(not queue.close(timeout) for queue in queues) == 0
