"""The KV groups of a model: as it declares them, and as its blocks are handed out."""

from __future__ import annotations

from quire.kv_groups import KVGroup, even_groups, without_windows
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.config import ModelConfig


def declared_groups(config: ModelConfig, tp: TensorParallel = SINGLE) -> tuple[KVGroup, ...]:
    """One group for each reach that layers have, full layers first."""
    heads = len(tp.split_or_share(config.num_kv_heads, "KV heads"))
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    return tuple(
        KVGroup.keys_and_values(
            [i for i, other in enumerate(config.windows) if other == window],
            heads,
            config.head_dim,
            window,
        )
        for window in windows
    )


def pool_groups(
    config: ModelConfig, tp: TensorParallel = SINGLE, *, window_groups: bool
) -> tuple[KVGroup, ...]:
    """The groups that have tables of their own.

    Without `window_groups` layers keep all tokens of a sequence, however far they see.
    """
    declared = declared_groups(config, tp)
    return even_groups(declared if window_groups else without_windows(declared))
