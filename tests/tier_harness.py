"""How the contract tests reach a tier, whatever it is made of: one small class for each kind."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from block_images import BLOCK_SIZE

from quire.kv.image import MAGIC, BlockName, name_in
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.geometry import DATA_FILE, Geometry
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import PAGE, Tier

IMAGE_BYTES = 20_000  # not a whole number of pages
ROOM = 64  # blocks that a tier of the tests holds at least


class Harness(ABC):
    """Where a tier's blocks are: it opens tiers over them, and does harm to them."""

    image_bytes = IMAGE_BYTES
    survives_close = True  # whether another tier that is opened later finds the blocks

    @abstractmethod
    def open(self) -> Tier: ...

    @abstractmethod
    def flip_a_bit(self, name: BlockName) -> None:
        """In the stored image of this block."""

    def clean_up(self) -> None:
        """After the test."""
        return


class SsdHarness(Harness):
    def __init__(self, folder: Path, engine: str) -> None:
        self.folders = [folder / "one", folder / "two"]
        self.engine = engine
        self._open: list[SsdTier] = []

    def open(self) -> SsdTier:
        geometry = Geometry(self.image_bytes, BLOCK_SIZE)
        quota = 2 * geometry.quota_for(ROOM // 2)
        tier = SsdTier(
            self.folders, quota, self.image_bytes, BLOCK_SIZE, engine=choose_engine(self.engine)
        )
        self._open.append(tier)
        return tier

    def flip_a_bit(self, name: BlockName) -> None:
        folder, offset = self.find(name)
        flip(folder / DATA_FILE, offset + PAGE + 777)

    def find(self, name: BlockName) -> tuple[Path, int]:
        """The folder that holds the block, and where its slot begins."""
        for folder in self.folders:
            data = (folder / DATA_FILE).read_bytes()
            for offset in range(0, len(data), PAGE):
                if data[offset : offset + 8] == MAGIC and name_in(data[offset:]) == name:
                    return folder, offset
        raise AssertionError("no folder holds the block")

    def clean_up(self) -> None:
        for tier in self._open:
            tier.close()


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ 1]), offset)
    os.fsync(fd)
    os.close(fd)
