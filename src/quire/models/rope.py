"""What a config.json says of rotary positions, in the words of transformers 4 and 5."""

from __future__ import annotations

import math

from quire.errors import ModelError
from quire.layers.rope import ROPE_KINDS, RopeConfig
from quire.models.json_fields import Raw, number, whole_number

ORIGINAL = "original_max_position_embeddings"


def read_rope(raw: Raw) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    rope = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    rope |= raw.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("The model rotates some layers unlike others, which Quire does not do.")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"The model scales its rotary positions by {kind!r}; Quire knows "
            f"{', '.join(ROPE_KINDS)}."
        )
    refuse_partial(raw, rope)
    theta = number(rope, "rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = number(rope, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    original = whole_number({**raw, **rope}, ORIGINAL, raw.get("max_position_embeddings"))
    if kind == "llama3":
        low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=yarn_attention_factor(rope, factor),
    )


def refuse_partial(raw: Raw, rope: Raw) -> None:
    part = number({**raw, **rope}, "partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ModelError(
            f"The model rotates only a part of each head (partial_rotary_factor={part}), "
            f"which Quire does not support."
        )


def yarn_attention_factor(rope: Raw, factor: float) -> float:
    """Yarn sharpens attention as it stretches positions: as given, or by the paper's rule."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(number(rope, "mscale")) / magnitude(number(rope, "mscale_all_dim"))
    return magnitude(1.0)
