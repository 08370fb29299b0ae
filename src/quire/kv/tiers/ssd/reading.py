"""Reads blocks: while the next ones come from the disk, the last one is verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.kv.image import BlockName, Verdict, examine
from quire.kv.tiers.ssd.batch import SHORT, Batch
from quire.kv.tiers.ssd.io_engine import Transfer
from quire.kv.tiers.ssd.store import Store


def read_blocks(
    store: Store,
    names: Sequence[BlockName],
    images: Sequence[memoryview],
    sizes: Sequence[int],
) -> list[bool]:
    """For each block whether `images` holds it now; those that are not whole are dropped."""
    reading = _Reading(store, names, images, sizes)
    try:
        store.engine.run(reading.pieces(), reading.done)
    finally:
        store.catalog.unpin(reading.pins)
    return reading.whole


class _Reading(Batch):
    def __init__(
        self,
        store: Store,
        names: Sequence[BlockName],
        images: Sequence[memoryview],
        sizes: Sequence[int],
    ) -> None:
        super().__init__(store.geometry, images, sizes)
        self._names = names
        self.whole = [False] * len(names)
        self.pins = store.catalog.pin([name.key for name in names])
        self._store = store

    def pieces(self) -> Iterator[Transfer]:
        for block, pin in enumerate(self.pins):
            if pin:
                yield from self.transfers(block, *self._store.slot(pin.place), is_write=False)

    def done(self, transfer: Transfer, result: int) -> None:
        if not self.ends_block(transfer, result):
            return
        block = transfer.block
        pin = self.pins[block]
        assert pin is not None
        reason = self._what_is_wrong(block, pin.place)
        if reason is None:
            self.whole[block] = True
        else:
            self._store.drop(pin, reason)

    def _what_is_wrong(self, block: int, place: int) -> str | None:
        if code := self.errors[block]:
            return Verdict.TORN.value if code == SHORT else self._store.note_error(place, code)
        self._store.slot(place)[0].went_well()
        verdict = examine(self._names[block], self.head(block), self.image(block))
        return None if verdict is Verdict.WHOLE else verdict.value
