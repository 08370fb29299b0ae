"""The KV groups of a model: as it declares them, and as its blocks are handed out."""

from __future__ import annotations

from functools import lru_cache

from quire.kv_groups import KVGroup, even_groups, without_windows
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.config import ModelConfig


def declared_groups(config: ModelConfig, tp: TensorParallel = SINGLE) -> tuple[KVGroup, ...]:
    """What one of these ranks caches; groups that keep all tokens come first."""
    return _declared(config, tp.alone)


@lru_cache(maxsize=16)  # to build a model takes a while, even one without weights
def _declared(config: ModelConfig, tp: TensorParallel) -> tuple[KVGroup, ...]:
    from quire.models.source import shapes

    return tuple(sorted(shapes(config, tp).kv_groups(tp), key=lambda group: group.window or 0))


def pool_groups(
    config: ModelConfig, tp: TensorParallel = SINGLE, *, window_groups: bool
) -> tuple[KVGroup, ...]:
    """The groups that have tables of their own.

    Without `window_groups` layers keep all tokens of a sequence, however far they see.
    """
    declared = declared_groups(config, tp)
    return even_groups(declared if window_groups else without_windows(declared))
