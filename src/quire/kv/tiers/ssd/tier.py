"""The SSD tier: what `Tier` asks for, over the folders of a `Store`.

Transfers are not given up in the middle, because the disk would go on writing into memory that
belongs to another transfer by then; callers that must not wait for a slow disk call from a thread
of their own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.kv.block_log import BlockLog
from quire.kv.image import BlockName, HeldBlock
from quire.kv.policy import LearnedPolicy, Policy
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.io_engine import IoEngine
from quire.kv.tiers.ssd.open_guard import Gate
from quire.kv.tiers.ssd.reading import read_blocks
from quire.kv.tiers.ssd.stamps import Stamps
from quire.kv.tiers.ssd.store import Store
from quire.kv.tiers.ssd.writing import write_blocks
from quire.kv.tiers.tier import Tier

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
REFUSALS = {"no space": "no space on the disk", "io error": "the disk failed"}


class SsdTier(Tier):
    """Blocks in files that outlive the process, within `quota_bytes` of disk in all."""

    name = "ssd"
    is_local = True

    def __init__(
        self,
        folders: Sequence[Path],
        quota_bytes: int,
        image_bytes: int | Sequence[int],
        block_size: int,
        *,
        tenant_share: float = 1.0,
        policy: Policy[bytes] | None = None,
        engine: IoEngine | None = None,
    ) -> None:
        super().__init__(image_bytes)
        geometry = Geometry(self.image_bytes, block_size)
        slots = geometry.slots_within(quota_bytes // len(folders)) * len(folders)
        if not slots:
            least = geometry.quota_for(1) * len(folders)
            raise ConfigError(
                f"ssd_cache_bytes {quota_bytes:,} holds no block; give at least {least:,}."
            )
        if not int(tenant_share * slots):
            raise ConfigError(
                f"tenant_cache_share={tenant_share:g} of ssd_cache_bytes, {slots:,} blocks, holds "
                "no block; raise either."
            )
        self.quota_bytes = quota_bytes
        self._store = Store(
            folders,
            quota_bytes,
            geometry,
            policy or LearnedPolicy(slots, tenant_share=tenant_share),
            engine or choose_engine(),
            self.counters,
        )
        self._gate = Gate()
        self._stamps = Stamps()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        places = self._store.catalog.places if self._gate.is_open else {}
        return [key in places for key in keys]

    def use(self, keys: Sequence[bytes]) -> None:
        self._stamps.note(self._store.catalog.use(keys))

    def read(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        whole, sizes = [False] * len(names), self.sizes(names)
        with (
            self._gate.entered() as is_open,
            self.counters.timing(self.counters.reads, sizes) as done,
        ):
            if is_open:
                whole = read_blocks(self._store, names, images, sizes)
                done += whole
                self._write_stamps(self._stamps.due())
        return whole

    def write(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        sizes = self.sizes(names)
        with (
            self._gate.entered() as is_open,
            self.counters.timing(self.counters.writes, sizes) as done,
        ):
            if not is_open:
                return [False] * len(names)
            if not self._store.slots:
                self.counters.drop("no space", len(names))
            before = self.counters.drops.copy()
            done += write_blocks(self._store, names, images, sizes)
            self._write_stamps(self._stamps.due())
            held = self.contains([name.key for name in names])
            if not all(held):
                self.refusal = self._why_refused(names[held.index(False)], before)
            return held

    def _why_refused(self, name: BlockName, before: Counter[str]) -> str:
        """`before`: what had been dropped before it was to be written."""
        if not self._store.slots:
            return "no space on the disk"
        for reason, says in REFUSALS.items():
            if self.counters.drops[reason] > before[reason]:
                return says
        return self._store.catalog.why_turned_away(name)

    def held(self) -> list[HeldBlock]:
        """As the records on disk say, which are read for it."""
        found: list[HeldBlock] = []
        with self._gate.entered() as is_open:
            for volume in self._store.volumes.values() if is_open else ():
                try:
                    held = volume.index.read()
                except OSError:  # the next write finds out what has become of the disk
                    continue
                columns = held.keys(), held.parents(), held.roots(), held.tenants()
                found += map(HeldBlock._make, zip(*columns, strict=True))
        places = self._store.catalog.places
        return [block for block in found if block.key in places]

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        return self._store.catalog.pin_for(keys, seconds)

    def delete(self, keys: Sequence[bytes]) -> int:
        count = 0
        with self._gate.entered() as is_open:
            pins = self._store.catalog.pin(keys) if is_open else []
            try:
                for pin in filter(None, pins):
                    count += self._store.drop(pin, "deleted")
            finally:
                self._store.catalog.unpin(pins)
        return count

    def publish_events(self, log: BlockLog) -> None:
        self._store.catalog.publish_events(log)

    def slot_states(self) -> npt.NDArray[np.uint8] | None:
        return self._store.catalog.slot_states()

    def stats(self) -> dict[str, Any]:
        store = self._store
        with self._gate.entered() as is_open:
            volumes = list(store.volumes.values()) if is_open else []
            return {
                "slots": store.slots,
                "used": len(store.catalog.places),
                "evicted": store.catalog.evicted,
                "quota_bytes": self.quota_bytes,
                "bytes_on_disk": sum(volume.bytes_on_disk() for volume in volumes),
                "engine": store.engine.name,
                "direct": bool(volumes) and all(volume.is_direct for volume in volumes),
                "failed_folders": [str(each.folder) for each in volumes if each.has_failed],
                **super().stats(),
            }

    def close(self) -> None:
        if not self._gate.is_open:
            return
        if not self._gate.close(CLOSE_SECONDS):
            # The disk still has memory of the callers: files and rings must outlive that.
            logger.warning("the SSD cache is left open: its disk has not answered")
            return
        self._write_stamps(self._stamps.due(now=True))
        self._store.close()

    def _write_stamps(self, used: dict[int, int]) -> None:
        for place, stamp in used.items():
            volume, slot = self._store.slot(place)
            try:
                volume.index.stamp(slot, stamp)
            except OSError as error:
                self._store.note_error(place, error.errno)
                return
