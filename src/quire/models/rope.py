"""What a config.json says of rotary positions, in the words of transformers 4 and 5."""

from __future__ import annotations

import math

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.rope import ROPE_KINDS, RopeConfig
from quire.models.checkpoints.json_fields import (
    Raw,
    flag,
    mapping,
    number,
    positive_number,
    refusal,
    text,
    whole_number,
)

ORIGINAL = "original_max_position_embeddings"
LOW, HIGH = "low_freq_factor", "high_freq_factor"
MOST_SCALE = 1000.0  # of attention, in one direction or the other


def read_rope(raw: Raw) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    rope = {"rope_theta": raw.get("rope_theta"), **mapping(raw, "rope_scaling")}
    rope |= mapping(raw, "rope_parameters")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("The model rotates some layers unlike others, which Quire does not do.")
    kind = text(rope, "rope_type") or text(rope, "type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"The model scales its rotary positions by {shown(kind)}; Quire knows "
            f"{', '.join(ROPE_KINDS)}."
        )
    refuse_partial(raw, rope)
    theta = positive_number(rope, "rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = positive_number(rope, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    original = whole_number({**raw, **rope}, ORIGINAL, raw.get("max_position_embeddings"))
    if kind == "llama3":
        low, high = positive_number(rope, LOW), positive_number(rope, HIGH)
        if low >= high:
            raise refusal(LOW, low, f"less than {HIGH}")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if theta <= 1:
        raise refusal("rope_theta", theta, "a number above 1")
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=positive_number(rope, "beta_fast", 32.0),
        beta_slow=positive_number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", True),
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
        return number(rope, "attention_factor", most=MOST_SCALE, least=1 / MOST_SCALE)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        one, all_dim = (
            number(rope, key, most=MOST_SCALE, least=0.0) for key in ("mscale", "mscale_all_dim")
        )
        return magnitude(one) / magnitude(all_dim)
    return magnitude(1.0)
