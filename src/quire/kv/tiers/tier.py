"""What a tier below host memory has to do: be asked, read, write; never be in the way.

Calls block, for as long as the tier's own deadline allows, and are made from threads that have
nothing else to do; several threads may call at once. No call raises because of what a disk or a
network does: whatever goes wrong is a block that is not there, dropped and counted.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kv.block_log import BlockLog
from quire.kv.image import BlockName, HeldBlock

PAGE = 4096  # buffers and image sizes are whole pages: direct I/O wants them so


@dataclass
class Traffic:
    """One direction of a tier."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, blocks: int, bytes: int, seconds: float = 0.0) -> None:
        self.blocks += blocks
        self.bytes += bytes
        self.seconds += seconds


@dataclass
class Counters:
    """What a tier has done; shared by its threads."""

    reads: Traffic = field(default_factory=Traffic)
    writes: Traffic = field(default_factory=Traffic)
    drops: Counter[str] = field(default_factory=Counter)  # blocks, by reason
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def timing(self, traffic: Traffic, sizes: Sequence[int]) -> Iterator[list[bool]]:
        """Count the images whose flag, in the list that is given, is set at the end.

        `sizes`: of the images that there are flags for, in bytes.
        """
        done: list[bool] = []
        started = time.perf_counter()
        yield done
        with self._lock:
            moved = sum(compress(sizes, done))
            traffic.add(sum(done), moved, time.perf_counter() - started)

    def drop(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self.drops[reason] += count

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "reads": vars(self.reads).copy(),
                "writes": vars(self.writes).copy(),
                "drops": dict(self.drops),
            }


class Tier(ABC):
    """A place for block images, found by their keys; those of one KV group are of one size."""

    name: str  # "ssd", "remote"
    # Why it did not take what it was given last, in a few words, where it knows.
    refusal = ""
    is_local: bool  # whether `contains` answers from memory, so that the scheduler may call it

    def __init__(self, image_bytes: int | Sequence[int]) -> None:
        """The size of images of each group, or of the only one."""
        self.group_bytes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
        self.image_bytes = max(self.group_bytes)  # room for any
        self.counters = Counters()

    def sizes(self, names: Sequence[BlockName]) -> list[int]:
        """Bytes of each of these blocks' images."""
        group_bytes = self.group_bytes
        return [group_bytes[name.group] for name in names]

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the tier holds it, as far as it knows; False in doubt."""

    @abstractmethod
    def use(self, keys: Sequence[bytes]) -> None:
        """A request asked for these, from the first block on: what to keep follows from it."""

    @abstractmethod
    def read(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        """Fill `images` and verify them; for each whether it is now the block that was asked for.

        Buffers are page-aligned, and whole pages with room for any image.
        """

    @abstractmethod
    def write(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        """Keep these if there is room or they are worth it; for each whether it is held now."""

    # Control: None where a kind of tier cannot do it.

    def held(self) -> list[HeldBlock] | None:
        """All blocks that it holds."""
        return None

    def blocks_by_root(self) -> dict[str, int] | None:
        """How many blocks it holds of each root, which stands for a namespace and a salt.

        Of a root there are its first 16 hex digits.
        """
        held = self.held()
        return None if held is None else dict(Counter(block.root[:8].hex() for block in held))

    def pin(self, keys: Sequence[bytes], seconds: float) -> int | None:
        """Do not evict these for so long; how many of them stay."""
        return None

    def delete(self, keys: Sequence[bytes]) -> int | None:
        """Forget these; how many there were."""
        return None

    def delete_roots(self, roots: Sequence[bytes], tenant: bytes) -> int | None:
        """Forget all blocks of these roots, where `held` does not say which they are.

        And of this tenant, under whatever root, where the store knows whose its blocks are.
        """
        return None

    def publish_events(self, log: BlockLog) -> None:
        """Let `log` know what is held and what becomes of it, if the tier is this engine's own."""
        return None

    def slot_states(self) -> npt.NDArray[np.uint8] | None:
        """For each slot 0 free, 1 kept, 2 in use; None where the tier does not know its slots."""
        return None

    def stats(self) -> dict[str, Any]:
        return self.counters.as_dict()

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way, within a bound, and let go of files and connections."""
