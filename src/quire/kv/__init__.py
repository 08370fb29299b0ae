"""Where KV lives: blocks, their reference counts, the prefix index, and the memory behind them.

The tiers below the device are a library of their own, for this engine or another: `open_store`
and what goes with it. Each name is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.kv.control import CacheControl, Control, Listing
    from quire.kv.grouped_match import GroupedMatch
    from quire.kv.images import ImagePool
    from quire.kv.keys import Namespace
    from quire.kv.loads import Load
    from quire.kv.open import open_store
    from quire.kv.pools.stream_pool import LayerPool, SlotPool
    from quire.kv.pools.streams import streams_of
    from quire.kv.puts import Put
    from quire.kv.store import KVStore
    from quire.kv.tier_match import TierMatch

__all__ = [
    "CacheControl",
    "Control",
    "GroupedMatch",
    "ImagePool",
    "KVStore",
    "LayerPool",
    "Listing",
    "Load",
    "Namespace",
    "Put",
    "SlotPool",
    "TierMatch",
    "open_store",
    "streams_of",
]

_LAZY = {
    "CacheControl": "quire.kv.control",
    "Control": "quire.kv.control",
    "GroupedMatch": "quire.kv.grouped_match",
    "ImagePool": "quire.kv.images",
    "KVStore": "quire.kv.store",
    "LayerPool": "quire.kv.pools.stream_pool",
    "Listing": "quire.kv.control",
    "Load": "quire.kv.loads",
    "Namespace": "quire.kv.keys",
    "Put": "quire.kv.puts",
    "SlotPool": "quire.kv.pools.stream_pool",
    "TierMatch": "quire.kv.tier_match",
    "open_store": "quire.kv.open",
    "streams_of": "quire.kv.pools.streams",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'quire.kv' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
