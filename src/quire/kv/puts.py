"""From the device to the tiers: into a slot of host memory, and from there into each tier below.

The device's blocks are free again as soon as they are copied. Slower tiers take their time: they
read the slot, which is held for them; with too much waiting to be written, new images are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from quire.kv.foreground import Foreground
from quire.kv.image import BlockName
from quire.kv.images import ImagePool, Transfer
from quire.kv.job_queue import Handle, JobQueue, OpenHandles
from quire.kv.loads import Load
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.tier import Tier

PIECE_BYTES = 32 << 20
MOST_WAITING = 64  # jobs, for one tier
SLOT_WAIT_S = 1.0  # for a slot of host memory, while all wait to be written
# How long each piece waits for loads to end: a request waits for a load, and the GPU computes more
# slowly while both directions are busy.
LOADS_FIRST_S = 0.005


Pair = tuple[BlockName, int]  # and the block of the device


class Put(Handle):
    """Blocks that are being copied off the device; when it is over they may be written again."""


class Write(Handle):
    """Images that are being written to a tier below host memory."""


class Kept(NamedTuple):
    name: BlockName
    slot: int


class Putter:
    """Runs puts: a job queue copies off the device, one waits for copies, one writes each tier."""

    def __init__(
        self,
        pool: ImagePool,
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
        self._writes = {tier.name: JobQueue(f"{tier.name} writes") for tier in tiers}

    def start(
        self,
        put: Put,
        names: Sequence[BlockName],
        blocks: Sequence[int],
        after: torch.cuda.Event | None,
    ) -> None:
        pairs = list(zip(names, blocks, strict=True))
        for piece in self._pieces(pairs):
            self._copies.submit(partial(self._copy, put, piece, after))
        # Both queues do one job after the other, so this is behind all of the put's copies.
        self._copies.submit(lambda: self._completions.submit(put.end))

    def _pieces(self, pairs: list[Pair]) -> Iterator[list[Pair]]:
        """So many at once, and of one KV group."""
        num_groups = len(self.pool.image_bytes)
        for group in range(num_groups):
            of_group = [p for p in pairs if p[0].group == group] if num_groups > 1 else pairs
            for at in range(0, len(of_group), self.piece):
                yield of_group[at : at + self.piece]

    def _copy(self, put: Put, pairs: list[Pair], after: torch.cuda.Event | None) -> None:
        memory, group = self.host.memory, pairs[0][0].group
        while pairs and not put.cancelled:
            self.handles.wait_for_all(LOADS_FIRST_S, Load)
            self.foreground.give_way()
            slots = self.host.take(len(pairs), SLOT_WAIT_S)
            if not slots:
                put.cancel()  # all slots wait for a slow tier: the rest would wait as long
                return
            kept = [Kept(name, slot) for (name, _), slot in zip(pairs, slots, strict=False)]
            blocks = [block for _, block in pairs[: len(slots)]]
            try:
                transfer = self.pool.to_host(blocks, memory.images, slots, after, group)
            except Exception:
                self.host.release(slots)
                raise
            self._completions.submit(partial(self._arrive, kept, transfer))
            pairs = pairs[len(slots) :]

    def _arrive(self, kept: list[Kept], transfer: Transfer) -> None:
        transfer.wait()
        self.foreground.give_way()
        size = self.pool.moved_bytes([name.group for name, _ in kept])
        self.host.counters.writes.add(len(kept), size, transfer.seconds)
        self.host.keep([name for name, _ in kept], [slot for _, slot in kept])
        for tier in self.tiers:
            self.write(tier, kept)
        self.host.release([slot for _, slot in kept])

    def write(self, tier: Tier, kept: list[Kept]) -> None:
        """Begin to write images to a tier, from slots that are held until they are written."""
        if not kept:
            return
        queue = self._writes[tier.name]
        if queue.backlog >= MOST_WAITING:
            tier.counters.drop("too much waiting to be written", len(kept))
            return
        self.host.hold_slots([slot for _, slot in kept])
        write = Write()
        self.handles.follow(write)
        queue.submit(partial(self._write, write, tier, kept))

    def _write(self, write: Write, tier: Tier, kept: list[Kept]) -> None:
        try:
            new = [
                each
                for each, there in zip(kept, tier.contains([k.name.key for k in kept]), strict=True)
                if not there
            ]
            if new and not write.cancelled:
                images = [self.host.memory.buffer(each.slot) for each in new]
                tier.write([each.name for each in new], images)
        finally:
            self.host.release([slot for _, slot in kept])
            write.end()

    def leave_device(self, timeout: float) -> bool:
        """Wait until no copy that was begun is under way."""
        return all(queue.catch_up(timeout) for queue in (self._copies, self._completions))

    def close(self, timeout: float) -> bool:
        queues = [self._copies, self._completions, *self._writes.values()]
        return sum(not queue.close(timeout) for queue in queues) == 0
