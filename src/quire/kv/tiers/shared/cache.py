"""What the server holds: a host pool with an SSD tier below it, for blocks of one shape.

    write   memory of a connection ──▶ a slot, verified there ──▶ kept ──▶ SSD
    read    a slot ──▶ memory of a connection; or SSD ──▶ a slot, kept ──▶ memory of a connection

A slot is held by calls and by writes to the SSD, and each ends by itself: a client that dies holds
nothing. No client waits for the SSD to write what host memory keeps, so a slow disk is no outage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import not_
from typing import Any

import numpy as np

from quire.kv.image import (
    NO_TENANT,
    BlockName,
    HeldBlock,
    Verdict,
    examine,
    header,
    name_in,
    size_in,
)
from quire.kv.job_queue import JobQueue
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.shared.exchange import Exchange
from quire.kv.tiers.shared.protocol import Shape
from quire.kv.tiers.ssd.tier import SsdTier

SLOT_WAIT_S = 0.5  # while all slots are held by other calls
MOST_WAITING = 8  # writes to the SSD, of a batch each
TOO_MUCH = "too much waiting to be written"
CLOSE_S = 10.0

Block = tuple[BlockName, int]  # and the slot that has its image


class SharedCache:
    """Any number of threads may call."""

    def __init__(self, shape: Shape, host: HostTier, ssd: SsdTier) -> None:
        self.shape, self.host, self.ssd = shape, host, ssd
        self._ssd_writes = JobQueue("ssd writes")
        # Of each slot's image: whose bytes they are, and their checksum.
        self._heads = np.zeros((host.memory.num_slots, shape.head_bytes), np.uint8)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        here, below = self.host.contains(keys), self.ssd.contains(keys)
        return [any(held) for held in zip(here, below, strict=True)]

    def use(self, keys: Sequence[bytes]) -> None:
        self.host.use(keys)
        self.ssd.use(keys)

    def read(self, names: Sequence[BlockName], exchange: Exchange) -> list[bool]:
        """Put the images that are held into the exchange; for each whether it is there."""
        found = [self._read_from_host(at, name, exchange) for at, name in enumerate(names)]
        absent = [at for at, is_found in enumerate(found) if not is_found]
        below = self.ssd.contains([names[at].key for at in absent])
        wanted = [at for at, is_held in zip(absent, below, strict=True) if is_held]
        while wanted:
            with self._slots(len(wanted)) as slots:
                if not slots:
                    break
                part, wanted = wanted[: len(slots)], wanted[len(slots) :]
                buffers = [self.host.memory.buffer(slot) for slot in slots]
                whole = self.ssd.read([names[at] for at in part], buffers)
                for at, slot, is_whole in zip(part, slots, whole, strict=True):
                    found[at] = is_whole
                    if is_whole:
                        self._set_head(slot, header(names[at], self._image(slot, names[at])))
                        self.host.keep([names[at]], [slot])
                        self._copy_out(slot, at, names[at], exchange)
        return found

    def write(self, names: Sequence[BlockName], exchange: Exchange) -> list[bool]:
        """Keep the images that are in the exchange; for each whether it is held now."""
        keys = [name.key for name in names]
        new = [at for at, is_held in enumerate(self.contains(keys)) if not is_held]
        while new:
            with self._slots(len(new)) as slots:
                if not slots:
                    break
                part, new = new[: len(slots)], new[len(slots) :]
                good = [
                    (names[at], slot)
                    for at, slot in zip(part, slots, strict=True)
                    if self._copy_in(at, slot, names[at], exchange)
                ]
                kept = self.host.keep([name for name, _ in good], [slot for _, slot in good])
                if here := list(compress(good, kept)):
                    self._write_behind(here)
                if others := list(compress(good, map(not_, kept))):
                    self._write_to_ssd(others)
        return self.contains(keys)

    def check(self, keys: Sequence[bytes]) -> None:
        """A client found something wrong with these: drop those that really are."""
        for key in keys:
            for slot in self.host.hold([key]):
                head = self._heads[slot].data
                name = name_in(head)
                image = self.host.memory.image(slot)[: size_in(head)]
                if name is None or examine(name, head, image) is not Verdict.WHOLE:
                    self.host.counters.drop(Verdict.CORRUPT.value)
                    self.host.remove([key])
                self.host.release([slot])

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """Do not evict these for so long; how many of them stay."""
        return max(self.host.pin(keys, seconds), self.ssd.pin(keys, seconds))

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these; how many there were."""
        count = sum(self.contains(keys))
        self.host.remove(keys)
        self._ssd_writes.catch_up(CLOSE_S)  # else what is about to be written would come back
        self.ssd.delete(keys)
        return count

    def delete_roots(self, roots: Sequence[bytes], tenant: bytes) -> int:
        """And all that is this tenant's: engines forget under which salts it has asked."""
        self._ssd_writes.catch_up(CLOSE_S)
        wanted, held = set(roots), self._held()
        owner = tenant if tenant != NO_TENANT else None
        found = [block for block in held if block.root in wanted or block.tenant == owner]
        return self.delete([block.key for block in found])

    def blocks_by_root(self) -> dict[str, int]:
        return dict(Counter(block.root[:8].hex() for block in self._held()))

    def _held(self) -> list[HeldBlock]:
        """Each block once."""
        held = {block.key: block for block in (*self.host.held(), *self.ssd.held())}
        return list(held.values())

    def stats(self) -> dict[str, Any]:
        return {self.host.name: self.host.stats(), self.ssd.name: self.ssd.stats()}

    def close(self) -> None:
        self._ssd_writes.close(CLOSE_S)
        self.ssd.close()
        self.host.memory.close()

    def _write_behind(self, blocks: Sequence[Block]) -> None:
        if self._ssd_writes.backlog >= MOST_WAITING:
            self.ssd.counters.drop(TOO_MUCH, len(blocks))
            return
        slots = [slot for _, slot in blocks]

        def write() -> None:
            try:
                self._write_to_ssd(blocks)
            finally:
                self.host.release(slots)

        self.host.hold_slots(slots)
        self._ssd_writes.submit(write)

    def _write_to_ssd(self, blocks: Sequence[Block]) -> None:
        buffers = [self.host.memory.buffer(slot) for _, slot in blocks]
        self.ssd.write([name for name, _ in blocks], buffers)

    @contextmanager
    def _slots(self, count: int) -> Iterator[list[int]]:
        """Slots to be filled, up to `count`."""
        slots = self.host.take(count, SLOT_WAIT_S)
        try:
            yield slots
        finally:
            self.host.release(slots)

    def _read_from_host(self, at: int, name: BlockName, exchange: Exchange) -> bool:
        slots = self.host.hold([name.key])
        try:
            for slot in slots:
                self._copy_out(slot, at, name, exchange)
        finally:
            self.host.release(slots)
        return bool(slots)

    def _copy_out(self, slot: int, at: int, name: BlockName, exchange: Exchange) -> None:
        image = self._image(slot, name)
        np.copyto(exchange.image(at, len(image)), np.asarray(image))
        np.copyto(exchange.head(at), self._heads[slot])

    def _copy_in(self, at: int, slot: int, name: BlockName, exchange: Exchange) -> bool:
        """Whether what is in the slot now is the block's: the client could still write there."""
        image, head = self._image(slot, name), exchange.head(at).tobytes()
        np.copyto(np.asarray(image), exchange.image(at, len(image)))
        verdict = examine(name, head, image)
        if verdict is not Verdict.WHOLE:
            self.host.counters.drop(verdict.value)
            return False
        self._set_head(slot, head)
        return True

    def _image(self, slot: int, name: BlockName) -> memoryview:
        return self.host.memory.image(slot)[: self.shape.image_bytes[name.group]]

    def _set_head(self, slot: int, head: bytes) -> None:
        self._heads[slot].data[:] = head
