"""The tiers below the device, as the settings ask for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.gguf_product import ACTIVATION_BITS
from quire.kv.hit_rule import Window
from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.layout import KVLayout
from quire.kv.open import check_ssd, open_store
from quire.kv.store import KVStore
from quire.layers.formats import AllDense, MatrixFormats
from quire.layers.quantized.gguf import GGUFFormats
from quire.layers.rope import RopeConfig
from quire.models.source import ModelSource


def check_tiers(config: EngineConfig) -> None:
    """Refuse settings that cannot go together, before anything is loaded."""
    check_ssd(config.ssd_cache_dir, config.ssd_cache_bytes)
    if has_tiers(config) and not config.enable_prefix_caching:
        raise ConfigError(
            "The cache's lower tiers need enable_prefix_caching; leave it on, or leave out "
            "host_cache_bytes, ssd_cache_dir and remote_cache_url."
        )
    if config.tenant_cache_share < 1 and not (config.host_cache_bytes or config.ssd_cache_dir):
        raise ConfigError(
            "tenant_cache_share is a share of host memory and of the SSD cache; set "
            "host_cache_bytes or ssd_cache_dir, or leave it out."
        )


def build_store(
    config: EngineConfig, namespace: Namespace | None, pool: ImagePool, windows: Sequence[Window]
) -> KVStore | None:
    """None where no tier is asked for. `pool` is that of all ranks."""
    if not has_tiers(config):
        return None
    assert namespace is not None, "what leaves the pool needs a name"
    return open_store(
        pool,
        namespace,
        host_cache_bytes=config.host_cache_bytes,
        ssd_cache_dir=config.ssd_cache_dir,
        ssd_cache_bytes=config.ssd_cache_bytes,
        remote_cache_url=config.remote_cache_url,
        tenant_cache_share=config.tenant_cache_share,
        windows=windows,
    )


def has_tiers(config: EngineConfig) -> bool:
    return config.has_tiers


def block_namespace(
    source: ModelSource,
    dtype: torch.dtype,
    layout: KVLayout,
    num_ranks: int,
    expert_parallel: bool = False,
    activation_bits: int = ACTIVATION_BITS,
) -> Namespace:
    """What the bytes of a block depend on, besides its tokens; `layout` is that of one rank.

    It waits for the digest of the model's files.
    """
    return Namespace(
        model=source.fingerprint.result(),
        dtype=_arithmetic_name(source.config.formats, dtype, num_ranks, expert_parallel)
        + (
            "" if activation_bits == ACTIVATION_BITS else f", activations in {activation_bits} bits"
        ),
        kv_dtype=str(layout.dtype),
        block_size=layout.block_size,
        layout=f"{layout.shape_name} tp {1 if layout.is_replicated else num_ranks}",
        rope=_rope_name(source.config.rope),
    )


def _arithmetic_name(
    formats: MatrixFormats, dtype: torch.dtype, num_ranks: int, expert_parallel: bool
) -> str:
    """The same for ever for dense matrices; others round what they multiply by their own ways, and
    on several ranks each rounds its own part, of weights (`--quantization`) or of activations."""
    if isinstance(formats, AllDense):
        return str(dtype)
    name = f"{dtype} {hashlib.sha256(repr(formats).encode()).hexdigest()[:16]}"
    only_halves = isinstance(formats, GGUFFormats) and formats.only_halves
    if num_ranks == 1 or only_halves:
        return name
    return f"{name} on {num_ranks} ranks" + (" with whole experts" if expert_parallel else "")


def _rope_name(rope: RopeConfig) -> str:
    """The same for ever for what was there before partial rotation."""
    return str(rope) if rope.rotated is None else f"{rope}, {rope.rotated} rotated"
