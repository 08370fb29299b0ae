"""What a config.json says of rotary positions, in the words of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.rope import ROPE_KINDS, RopeConfig
from quire.models.checkpoints.json_fields import (
    Raw,
    flag,
    mapping,
    number,
    positive_number,
    positive_numbers,
    refusal,
    text,
    whole_number,
)

PARTIAL = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
LOW, HIGH = "low_freq_factor", "high_freq_factor"
MOST_SCALE = 1000.0  # of attention, in one direction or the other


def read_rope(raw: Raw, head_dim: int) -> RopeConfig:
    """The rotation of a family that turns whole heads."""
    part = number({**raw, **rope_fields(raw)}, PARTIAL, 1.0)
    if part != 1.0:
        raise ModelError(
            f"The model rotates only a part of each head ({PARTIAL}={part}), which Quire does not "
            f"support for its family."
        )
    return scaled_rope(raw, head_dim)


def read_partial_rope(raw: Raw, head_dim: int) -> RopeConfig:
    """The rotation of a family that may turn a part of each head."""
    part = number({**raw, **rope_fields(raw)}, PARTIAL, 1.0, least=0.0, most=1.0)
    rotated = int(head_dim * part + 1e-6)  # a quotient of whole numbers may be a bit too small
    if rotated < 2 or rotated % 2:
        raise refusal(PARTIAL, part, f"a part of {head_dim} features that is an even number")
    rope = scaled_rope(raw, rotated)
    return rope if rotated == head_dim else replace(rope, rotated=rotated)


def rope_fields(raw: Raw) -> Raw:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    rope = {"rope_theta": raw.get("rope_theta"), **mapping(raw, "rope_scaling")}
    return {**rope, **mapping(raw, "rope_parameters")}


def scaled_rope(raw: Raw, rotated: int) -> RopeConfig:
    """The frequencies of `rotated` features."""
    rope = rope_fields(raw)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("The model rotates some layers unlike others, which Quire does not do.")
    kind = text(rope, "rope_type") or text(rope, "type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"The model scales its rotary positions by {shown(kind)}; Quire knows "
            f"{', '.join(ROPE_KINDS)}."
        )
    theta = positive_number(rope, "rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "longrope":
        return longrope(theta, raw, rotated // 2)
    factor = stretch(raw, kind)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    original = original_length(raw)
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


def stretch(raw: Raw, kind: str) -> float:
    """By how much positions are scaled. Of yarn it may be null: by as much as texts are longer."""
    rope = rope_fields(raw)
    if kind == "yarn" and "factor" in rope and rope["factor"] is None:
        return whole_number(raw, "max_position_embeddings") / original_length(raw)
    return positive_number(rope, "factor")


def original_length(raw: Raw) -> int:
    """What the model was first trained on; unsaid, it is the length that it has now."""
    longest = raw.get("max_position_embeddings")
    return whole_number({**raw, **rope_fields(raw)}, ORIGINAL, longest)


def longrope(theta: float, raw: Raw, pairs: int) -> RopeConfig:
    """Two sets of divisors, of which the model's longest text chooses one."""
    rope, original = rope_fields(raw), original_length(raw)
    longest = whole_number(raw, "max_position_embeddings")
    factor = positive_number(rope, "factor", longest / original)
    sharper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original,
        attention_factor=number(
            rope, "attention_factor", sharper, most=MOST_SCALE, least=1 / MOST_SCALE
        ),
        short_divisors=positive_numbers(rope, "short_factor", pairs),
        long_divisors=positive_numbers(rope, "long_factor", pairs),
    ).for_length(longest)


def magnitude(factor: float, weight: float) -> float:
    """Yarn's `mscale`: how much sharper attention is over positions stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_magnitude(raw: Raw) -> float:
    """What DeepSeek's scores are multiplied by, on top of their usual scale: `mscale` squared."""
    rope = rope_fields(raw)
    kind = text(rope, "rope_type") or text(rope, "type") or "default"
    if kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    weight = number(rope, "mscale_all_dim", most=MOST_SCALE, least=0.0)
    return magnitude(stretch(raw, kind), weight) ** 2


def yarn_attention_factor(rope: Raw, factor: float) -> float:
    """Yarn sharpens attention as it stretches positions: as given, or by the paper's rule."""
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor", most=MOST_SCALE, least=1 / MOST_SCALE)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        one, all_dim = (
            number(rope, key, most=MOST_SCALE, least=0.0) for key in ("mscale", "mscale_all_dim")
        )
        return magnitude(factor, one) / magnitude(factor, all_dim)
    return magnitude(factor, 1.0)
