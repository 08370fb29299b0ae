"""Reads all that a folder holds and compares it with itself: record, header, key, checksum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from quire.kv.image import BlockName, Verdict, examine, name_in, size_in
from quire.kv.keys import block_key, group_key
from quire.kv.tiers.ssd.batch import SHORT, Batch
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.files import page_aligned
from quire.kv.tiers.ssd.geometry import whole_pages
from quire.kv.tiers.ssd.io_engine import Transfer
from quire.kv.tiers.ssd.records import Held
from quire.kv.tiers.ssd.volume import Volume

MEMORY_BYTES = 64 << 20
MOST_GROUPS = 64  # that a model has, for all a folder knows
REASONS = ("whole", "torn", "foreign", "corrupt", "io error")


def verify_volume(volume: Volume, start: Callable[[int], Callable[[], object]]) -> Counter[str]:
    """How many blocks were whole or not, and why; those that were not are dropped from the index.

    `start` is told how many blocks there are, and what it returns is called after each.
    """
    held = volume.index.read()
    held = held.only(np.argsort(held.slots))  # as they lie on the disk
    step = start(len(held))
    found = Counter(dict.fromkeys(REASONS, 0) | {"torn": len(held.torn)})
    for slot in held.torn.tolist():
        volume.index.clear(slot)
    size = whole_pages(volume.geometry.image_bytes)
    at_once = max(1, min(len(held), MEMORY_BYTES // size))
    memory = page_aligned(at_once * size)
    images = [memory[at : at + size] for at in range(0, len(memory), size)]
    engine = choose_engine()
    try:
        for first in range(0, len(held), at_once):
            part = held.only(np.arange(first, min(first + at_once, len(held))))
            batch = _Verifying(volume, part, images, found, step)
            engine.run(batch.pieces(), batch.done)
    finally:
        engine.close()
    return found


class _Verifying(Batch):
    def __init__(
        self,
        volume: Volume,
        held: Held,
        images: Sequence[memoryview],
        found: Counter[str],
        step: Callable[[], object],
    ) -> None:
        super().__init__(volume.geometry, images, [volume.geometry.image_bytes] * len(images))
        self._volume = volume
        self._slots: list[int] = held.slots.tolist()
        self._keys = held.keys()
        self._found = found
        self._step = step

    def pieces(self) -> Iterator[Transfer]:
        for block, slot in enumerate(self._slots):
            yield from self.transfers(block, self._volume, slot, is_write=False)

    def done(self, transfer: Transfer, result: int) -> None:
        if self.ends_block(transfer, result):
            reason = self._judge(transfer.block)
            self._found[reason] += 1
            if reason != Verdict.WHOLE.value:
                self._volume.index.clear(self._slots[transfer.block])
            self._step()

    def _judge(self, block: int) -> str:
        if code := self.errors[block]:
            return Verdict.TORN.value if code == SHORT else "io error"
        name = name_in(self.head(block))
        if name is None:
            return Verdict.TORN.value
        if self._keys[block] != name.key or not _is_key_of(name):
            return Verdict.FOREIGN.value
        image = self.image(block)[: size_in(self.head(block))]
        return examine(name, self.head(block), image).value


def _is_key_of(name: BlockName) -> bool:
    """Whether the key is made from the rest of the name, in whatever KV group."""
    key = block_key(name.parent, np.frombuffer(name.tokens, "<i4").tolist())
    return any(name.key == group_key(key, group) for group in range(MOST_GROUPS))
