"""From settings to a store: host memory, and below it a disk and a remote store, if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.checks import shown
from quire.config import parse_size, size
from quire.errors import ConfigError
from quire.kv.arguments import check_block_size
from quire.kv.hit_rule import Window
from quire.kv.keys import Namespace
from quire.kv.policy import LearnedPolicy
from quire.kv.pools.block_pool import BlockPool
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.memory import check_free
from quire.kv.tiers.tier import PAGE, Tier

# Host memory for images that only pass through: enough to keep a disk busy while others are copied.
PASSING_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
FEWEST_PASSING = 16


def open_store(
    pool: BlockPool[Any],
    namespace: Namespace,
    *,
    host_cache_bytes: int | str = 0,
    ssd_cache_dir: str | Path | None = None,
    ssd_cache_bytes: int | str | None = None,
    remote_cache_url: str | None = None,
    tenant_cache_share: float = 1.0,
    windows: Sequence[Window] = (None,),
) -> KVStore:
    """A store for the blocks of `pool`, whose bytes mean what `namespace` says.

    `windows` are those of its KV groups. The other settings are the engine's, by the same names;
    those that cannot be are a ConfigError.
    """
    check_ssd(ssd_cache_dir, ssd_cache_bytes)
    if ssd_cache_dir is not None and not isinstance(ssd_cache_dir, (str, Path)):
        raise ConfigError(f"ssd_cache_dir is text, or a Path, not {shown(ssd_cache_dir)}.")
    if remote_cache_url is not None and not isinstance(remote_cache_url, str):
        raise ConfigError(f"remote_cache_url is text, not {shown(remote_cache_url)}.")
    _check_pool(pool, namespace)
    _check_windows(windows, len(pool.image_bytes))
    host_cache_bytes = _size("host_cache_bytes", host_cache_bytes)
    if not host_cache_bytes and ssd_cache_dir is None and remote_cache_url is None:
        raise ConfigError(
            "A store without a tier keeps nothing; give host_cache_bytes, ssd_cache_dir with "
            "ssd_cache_bytes, or remote_cache_url."
        )
    check_free(host_cache_bytes)
    if not isinstance(tenant_cache_share, (int, float)) or not 0 < tenant_cache_share <= 1:
        raise ConfigError(
            f"tenant_cache_share must be above 0 and at most 1, not {shown(tenant_cache_share)}."
        )
    device = pool.device.type
    stride = -(-pool.block_bytes // PAGE) * PAGE
    capacity = host_cache_bytes // stride
    if host_cache_bytes and not capacity:
        raise ConfigError(
            f"host_cache_bytes={host_cache_bytes:,} holds no block, which takes {stride:,} bytes; "
            "raise it."
        )
    if capacity and not int(tenant_cache_share * capacity):
        raise ConfigError(
            f"tenant_cache_share={tenant_cache_share:g} of host_cache_bytes, {capacity:,} blocks, "
            "holds no block; raise either."
        )
    passing = max(FEWEST_PASSING, PASSING_BYTES[device] // stride)
    tiers: list[Tier] = []
    try:
        if ssd_cache_dir is not None and ssd_cache_bytes is not None:
            share = tenant_cache_share
            quota = _size("ssd_cache_bytes", ssd_cache_bytes)
            tiers.append(_open_ssd(ssd_cache_dir, quota, pool, namespace, share))
        if remote_cache_url is not None:
            tiers.append(_open_remote(remote_cache_url, pool, namespace))
        memory = pool.host_memory(capacity + passing)
    except BaseException:
        for tier in tiers:  # else an SSD tier's folder stays locked
            tier.close()
        raise
    policy: LearnedPolicy[bytes] = LearnedPolicy(capacity, tenant_share=tenant_cache_share)
    return KVStore(pool, namespace, HostTier(memory, policy), tiers, windows)


def _check_pool(pool: BlockPool[Any], namespace: Namespace) -> None:
    """Whether these are what they are said to be, and agree on the size of a block."""
    if not isinstance(pool, BlockPool):
        raise ConfigError(
            f"A store is over an ImagePool, a LayerPool or a SlotPool, not a "
            f"{type(pool).__name__}; make one of your tensors."
        )
    if not isinstance(namespace, Namespace):
        raise ConfigError(
            f"What the bytes of blocks depend on is said by a Namespace, not by a "
            f"{type(namespace).__name__}; give Namespace(model=…, …)."
        )
    check_block_size(namespace.block_size)
    if pool.tokens_of_block not in (None, namespace.block_size):
        raise ConfigError(
            f"A pool with blocks of {pool.tokens_of_block} tokens cannot keep those of "
            f"{namespace.block_size}; give the namespace the pool's block_size."
        )


def _check_windows(windows: Sequence[Window], num_groups: int) -> None:
    if not isinstance(windows, Sequence):
        raise ConfigError(
            f"windows is a list with one for each KV group, not {shown(windows)}; give None for a "
            "group without."
        )
    if len(windows) != num_groups:
        raise ConfigError(
            f"A pool with images of {num_groups} KV groups has {len(windows)} windows; "
            "give one for each, None for a group without."
        )
    if not all(each is None or (isinstance(each, int) and each > 0) for each in windows):
        raise ConfigError(f"A window is a number of tokens, or None, not one of {shown(windows)}.")


def _size(name: str, value: int | str) -> int:
    try:
        return parse_size(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} must be {size().says}, not {shown(value)}.") from None


def check_ssd(ssd_cache_dir: str | Path | None, ssd_cache_bytes: int | str | None) -> None:
    if (ssd_cache_dir is None) != (ssd_cache_bytes is None):
        raise ConfigError("An SSD cache needs both ssd_cache_dir and ssd_cache_bytes; set both.")


def _open_ssd(
    folders: str | Path,
    quota: int,
    pool: BlockPool[Any],
    namespace: Namespace,
    tenant_share: float,
) -> Tier:
    """A `Path` is one folder, whatever its name; text may name several."""
    from quire.kv.tiers.ssd.store import parse_folders
    from quire.kv.tiers.ssd.tier import SsdTier

    return SsdTier(
        parse_folders(folders) if isinstance(folders, str) else [folders.expanduser().absolute()],
        quota,
        pool.image_bytes,
        namespace.block_size,
        tenant_share=tenant_share,
    )


def _open_remote(url: str, pool: BlockPool[Any], namespace: Namespace) -> Tier:
    from quire.kv.tiers.remote.open import open_remote

    return open_remote(url, pool.image_bytes, namespace.block_size)
