"""What a cache's server is given, and the cache that it opens for the first engine that comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.kv.policy import LearnedPolicy
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory
from quire.kv.tiers.shared.cache import SharedCache
from quire.kv.tiers.shared.protocol import Shape
from quire.kv.tiers.ssd.geometry import INDEX_FILE, Geometry
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import PAGE

PASSING_BYTES = 128 << 20  # of slots for images that only pass through
FEWEST_PASSING = 16


@dataclass(frozen=True)
class CacheSettings:
    """By the names that the engine's own tiers have."""

    folders: Sequence[Path]
    ssd_cache_bytes: int
    host_cache_bytes: int = 0
    tenant_cache_share: float = 1.0

    def open(self, shape: Shape) -> SharedCache:
        capacity = self.host_cache_bytes // shape.stride
        if self.host_cache_bytes and not int(self.tenant_cache_share * capacity):
            raise ConfigError(
                f"host_cache_bytes={self.host_cache_bytes:,} holds no block of a tenant, which "
                f"takes {shape.stride:,} bytes; raise it."
            )
        passing = max(FEWEST_PASSING, PASSING_BYTES // shape.stride)
        memory = HostMemory(shape.most_bytes, capacity + passing, pinned=False)
        # After the memory: a folder that is open cannot be opened when the next engine comes.
        ssd = SsdTier(
            self.folders,
            self.ssd_cache_bytes,
            shape.image_bytes,
            shape.block_size,
            tenant_share=self.tenant_cache_share,
        )
        policy: LearnedPolicy[bytes] = LearnedPolicy(capacity, tenant_share=self.tenant_cache_share)
        return SharedCache(shape, HostTier(memory, policy), ssd)

    def shape_on_disk(self) -> Shape | None:
        """The shape that the folders were made for, as far as they tell: not each group's size."""
        for folder in self.folders:
            try:
                with open(folder / INDEX_FILE, "rb") as index:
                    made_for = Geometry.of_first_page(index.read(PAGE))
            except OSError:
                continue
            if made_for is not None and made_for == Geometry(
                made_for.image_bytes, made_for.block_size
            ):
                return Shape(made_for.block_size, (made_for.image_bytes,))
        return None
