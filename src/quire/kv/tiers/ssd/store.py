"""All folders of a tier with the catalog over them, and what is done when a disk refuses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.errors import ConfigError
from quire.kv.image import Verdict
from quire.kv.policy import Policy
from quire.kv.tiers.ssd.batch import NO_SPACE, SHORT
from quire.kv.tiers.ssd.catalog import Catalog, Pin
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.io_engine import IoEngine
from quire.kv.tiers.ssd.open_folder import open_volume
from quire.kv.tiers.ssd.records import Held
from quire.kv.tiers.ssd.volume import Volume
from quire.kv.tiers.tier import Counters

logger = logging.getLogger(__name__)


class Store:
    """What reading and writing share."""

    def __init__(
        self,
        folders: Sequence[Path],
        quota: int,
        geometry: Geometry,
        policy: Policy[bytes],
        engine: IoEngine,
        counters: Counters,
    ) -> None:
        self.geometry = geometry
        self.engine = engine
        self.counters = counters
        self.catalog = Catalog(len(folders), policy)
        self.volumes: dict[int, Volume] = {}
        try:
            found = [
                self._open(number, folder, quota // len(folders))
                for number, folder in enumerate(folders)
            ]
            for place in self.catalog.restore([held for held in found if held]):
                self.catalog.free(place, usable=self.clear_record(place))
        except BaseException:
            self.close()
            raise

    def _open(self, number: int, folder: Path, quota: int) -> Held | None:
        """What it holds; None if it cannot be used."""
        try:
            self.volumes[number], held, torn = open_volume(folder, quota, self.geometry)
            held = self._without_those_held(self.volumes[number], held)
        except OSError as error:  # the disk's fault, and not the setting's: do without it
            logger.error("%s cannot be used (%s): it is left alone", folder, error.strerror)
            if number in self.volumes:
                self.volumes.pop(number).close()
            return None
        self.catalog.add_volume(number, self.volumes[number].slots, held)
        if torn:
            self.counters.drop(Verdict.TORN.value, torn)
        return held

    def _without_those_held(self, volume: Volume, held: Held) -> Held:
        """Folders that were used apart may hold the same blocks: the first one keeps them."""
        if not self.catalog.places:
            return held
        places, keys = self.catalog.places, held.keys()
        is_new = np.fromiter((key not in places for key in keys), np.bool_, len(held))
        for slot in held.slots[~is_new].tolist():
            volume.index.clear(slot)
        return held.only(is_new)

    @property
    def slots(self) -> int:
        return sum(volume.slots for volume in self.volumes.values() if not volume.has_failed)

    def slot(self, place: int) -> tuple[Volume, int]:
        number, slot = self.catalog.slot(place)
        return self.volumes[number], slot

    def drop(self, pin: Pin, reason: str) -> bool:
        """Forget a block on disk, too: it cannot be read, is not what it should be, or is unwanted.

        False if another thread was quicker.
        """
        if not self.catalog.drop(pin):
            return False
        self.counters.drop(reason)
        if not self.clear_record(pin.place):
            self.catalog.lose(pin.place)
        return True

    def clear_record(self, place: int) -> bool:
        volume, slot = self.slot(place)
        try:
            volume.index.clear(slot)
        except OSError:
            return False
        return True

    def note_error(self, place: int, code: int | None) -> str:
        """The reason that the block is dropped for; a folder with too many errors is given up."""
        if code in NO_SPACE:
            return "no space"
        number, _ = self.catalog.slot(place)
        volume = self.volumes[number]
        if code != SHORT:
            volume.went_wrong()
            if volume.has_failed:
                self.counters.drop("io error", self.catalog.remove_volume(number))
        return "io error"

    def close(self) -> None:
        for volume in self.volumes.values():
            volume.close()
        self.volumes.clear()
        self.engine.close()


def parse_folders(text: str) -> list[Path]:
    """`ssd_cache_dir`: one folder, or several with commas."""
    folders = [Path(part.strip()).expanduser().absolute() for part in text.split(",")]
    if not all(part.strip() for part in text.split(",")) or len(set(folders)) < len(folders):
        raise ConfigError(
            f"ssd_cache_dir {text!r} has an empty or a double name; give each folder once."
        )
    return folders
