"""Writes blocks: while the last ones go to the disk, the next one gets its checksum.

For each block: clear the record of the slot, write header and image, set the record. A kill at any
point leaves a slot whose record is clear, or one whose image is whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from quire.kv.image import BlockName, header
from quire.kv.tiers.ssd.batch import Batch
from quire.kv.tiers.ssd.io_engine import Transfer
from quire.kv.tiers.ssd.store import Store


def write_blocks(
    store: Store,
    names: Sequence[BlockName],
    images: Sequence[memoryview],
    sizes: Sequence[int],
) -> list[bool]:
    """For each block whether it was written now."""
    writing = _Writing(store, names, images, sizes)
    try:
        store.engine.run(writing.pieces(), writing.done)
    finally:
        writing.give_back_the_rest()
    return writing.written


class _Writing(Batch):
    def __init__(
        self,
        store: Store,
        names: Sequence[BlockName],
        images: Sequence[memoryview],
        sizes: Sequence[int],
    ) -> None:
        super().__init__(store.geometry, images, sizes)
        self._names = names
        self.written = [False] * len(names)
        self._store = store
        self._taken = store.catalog.take(names)
        self._now = time.time_ns()

    def pieces(self) -> Iterator[Transfer]:
        for block, taken in enumerate(self._taken):
            if taken is None or not self._cleared(block):
                continue
            self.head(block)[:] = header(self._names[block], self.image(block))
            yield from self.transfers(block, *self._store.slot(taken.place), is_write=True)

    def done(self, transfer: Transfer, result: int) -> None:
        if not self.ends_block(transfer, result):
            return
        block = transfer.block
        if code := self.errors[block]:
            self._refuse(block, code, usable=True)
        elif self._set_record(block):
            self.written[block] = True

    def give_back_the_rest(self) -> None:
        """After an exception; else there are none."""
        for block, taken in enumerate(self._taken):
            if taken:
                usable = self._store.clear_record(taken.place)
                self._store.catalog.give_back(self._names[block], taken.place, usable=usable)

    def _cleared(self, block: int) -> bool:
        taken = self._taken[block]
        assert taken is not None
        if not taken.was_held:
            return True
        volume, slot = self._store.slot(taken.place)
        try:
            volume.index.clear(slot)
        except OSError as error:
            self._refuse(block, error.errno, usable=False)
            return False
        return True

    def _set_record(self, block: int) -> bool:
        taken, name = self._taken[block], self._names[block]
        assert taken is not None
        volume, slot = self._store.slot(taken.place)
        try:
            # The first block of a sequence counts as used last: the others need it.
            volume.index.put(slot, name, self._now - block)
        except OSError as error:
            self._refuse(block, error.errno, usable=self._store.clear_record(taken.place))
            return False
        volume.went_well()
        self._taken[block] = None
        self._store.catalog.keep(name, taken.place)
        return True

    def _refuse(self, block: int, code: int | None, *, usable: bool) -> None:
        taken = self._taken[block]
        assert taken is not None
        self._taken[block] = None
        self._store.counters.drop(self._store.note_error(taken.place, code))
        self._store.catalog.give_back(self._names[block], taken.place, usable=usable)
