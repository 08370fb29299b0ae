"""How many bits a code has, and how many inputs share a scale."""

from __future__ import annotations

from typing import Any

from quire.checks import shown
from quire.errors import ModelError
from quire.models.checkpoints.json_fields import MOST_FEATURES, Raw, refusal, whole_number


def read_bits(raw: Raw, key: str, method: str, known: tuple[int, ...] = (4, 8)) -> int:
    bits: Any = raw.get(key)
    if type(bits) is not int or bits not in known:
        these = " or ".join(map(str, known))
        raise ModelError(
            f"The weights are quantised by {method} to {shown(bits)} bits, of which Quire reads "
            f"only {these}: choose a model with those."
        )
    return bits


def read_group(raw: Raw, key: str, default: int | None = None) -> int | None:
    """None stands for a whole row, which methods call -1."""
    value: Any = raw.get(key)
    if value == -1 and type(value) is int:
        return None
    if value is None and default is None:
        raise refusal(f"quantization_config.{key}", value, "a size of groups")
    return whole_number({key: value}, key, default, most=16 * MOST_FEATURES)
