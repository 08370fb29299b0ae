"""The tiers below the device, as the settings ask for them."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kv.keys import Namespace
from quire.kv.layout import KVLayout
from quire.kv.policy import LRU
from quire.kv.pool import PagedKVCache
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import HostMemory
from quire.kv.tiers.tier import PAGE, Tier
from quire.models.source import ModelSource
from quire.runner.memory import free_host_memory

# Host memory for images that only pass through: enough to keep a disk busy while others are copied.
PASSING_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
FEWEST_PASSING = 16


def check_tiers(config: EngineConfig) -> None:
    """Refuse settings that cannot go together, before anything is loaded."""
    if (config.ssd_cache_dir is None) != (config.ssd_cache_bytes is None):
        raise ConfigError("An SSD cache needs both ssd_cache_dir and ssd_cache_bytes; set both.")
    if has_tiers(config) and not config.enable_prefix_caching:
        raise ConfigError(
            "The cache's lower tiers need enable_prefix_caching; leave it on, or leave out "
            "host_cache_bytes, ssd_cache_dir and remote_cache_url."
        )


def build_store(
    config: EngineConfig, source: ModelSource, dtype: torch.dtype, pool: PagedKVCache
) -> KVStore | None:
    """None where no tier is asked for."""
    if not has_tiers(config):
        return None
    layout = pool.layout
    device = pool.images.device.type
    stride = -(-layout.block_bytes // PAGE) * PAGE
    capacity = config.host_cache_bytes // stride
    if config.host_cache_bytes and not capacity:
        raise ConfigError(
            f"host_cache_bytes={config.host_cache_bytes:,} holds no block, which takes {stride:,} "
            "bytes; raise it."
        )
    free = free_host_memory()
    if config.host_cache_bytes > free:
        raise ConfigError(
            f"host_cache_bytes={config.host_cache_bytes:,} is more than the {free:,} bytes of "
            "memory that are free; lower it."
        )
    passing = max(FEWEST_PASSING, PASSING_BYTES[device] // stride)
    tiers = _lower_tiers(config, layout)
    memory = HostMemory(layout.block_bytes, capacity + passing, pinned=device == "cuda")
    host = HostTier(memory, capacity, LRU(capacity))
    return KVStore(pool, _namespace(source, dtype, layout), host, tiers)


def has_tiers(config: EngineConfig) -> bool:
    return bool(config.host_cache_bytes or config.ssd_cache_dir or config.remote_cache_url)


def _lower_tiers(config: EngineConfig, layout: KVLayout) -> list[Tier]:
    tiers: list[Tier] = []
    if config.ssd_cache_dir is not None and config.ssd_cache_bytes is not None:
        from quire.kv.tiers.ssd.tier import SsdTier

        folders = [Path(each.strip()) for each in config.ssd_cache_dir.split(",") if each.strip()]
        room, size = config.ssd_cache_bytes, layout.block_bytes
        tiers.append(SsdTier(folders, room, size, layout.block_size))
    if config.remote_cache_url is not None:
        from quire.kv.tiers.remote.open import open_remote

        tiers.append(open_remote(config.remote_cache_url, layout.block_bytes, layout.block_size))
    return tiers


def _namespace(source: ModelSource, dtype: torch.dtype, layout: KVLayout) -> Namespace:
    shape = (layout.num_layers, layout.kv_dim, layout.num_kv_heads, layout.head_dim)
    return Namespace(
        model=source.fingerprint,
        dtype=str(dtype),
        kv_dtype=str(layout.dtype),
        block_size=layout.block_size,
        layout=f"{'x'.join(map(str, shape))} tp 1",
        rope=str(source.config.rope),
    )
