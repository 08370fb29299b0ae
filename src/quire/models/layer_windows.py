"""Sliding windows of single layers, as config.json says them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import ModelError
from quire.models.checkpoints.json_fields import Raw, flag, refusal, whole_number

KINDS = ("full_attention", "sliding_attention")


def layer_windows(num_layers: int, raw: Raw) -> tuple[int | None, ...]:
    """By `layer_types`, or in the layers from `max_window_layers` up."""
    window = window_size(raw)
    if window is None:
        return (None,) * num_layers
    full = whole_number(raw, "max_window_layers", 28, least=0)
    has_window = layer_kinds(num_layers, raw) or [i >= full for i in range(num_layers)]
    return tuple(window if windowed else None for windowed in has_window)


def patterned_layers(num_layers: int, raw: Raw, pattern: int) -> tuple[bool, ...]:
    """Which layers have a window: by `layer_types`, or all but every `pattern`-th."""
    kinds = layer_kinds(num_layers, raw)
    return tuple(kinds or [(i + 1) % pattern != 0 for i in range(num_layers)])


def window_size(raw: Raw) -> int | None:
    """The window of the layers that have one."""
    if not flag(raw, "use_sliding_window") or raw.get("sliding_window", 0) is None:
        return None
    return whole_number(raw, "sliding_window", 4096)


def layer_kinds(num_layers: int, raw: Raw) -> Sequence[bool]:
    """Which layers have a window, by `layer_types`; empty where it is unsaid."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return []
    if not isinstance(kinds, list) or not all(kind in KINDS for kind in kinds):
        raise refusal("layer_types", kinds, f"a list of {' and '.join(KINDS)}")
    if len(kinds) != num_layers:
        raise ModelError(
            f"The model's config has {len(kinds):,} layer_types for {num_layers:,} layers: "
            f"download it again."
        )
    return [kind == "sliding_attention" for kind in kinds]
