"""Fields of a config.json, each read with its type, its range, and a sentence if it has neither.

A config comes from strangers. So no field is used before it has passed one of these, and the ranges
are so wide that every model fits and so narrow that no product of two fields overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checks import INT32_MAX, shown
from quire.errors import ModelError

Raw = Mapping[str, Any]

MOST_LAYERS = 4096
MOST_FEATURES = 1 << 20  # of a token, or of one layer's heads together
MOST_HEAD_FEATURES = 4096
MOST_EXPERTS = 4096  # of a layer
MOST_TOKENS = 1 << 24  # in a vocabulary
SMALLEST, LARGEST = 1e-6, 1e15  # of the numbers that are no counts


def whole_number(
    raw: Raw, key: str, default: int | None = None, most: int = INT32_MAX, least: int = 1
) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        kind = "positive whole number" if least == 1 else f"whole number from {least}"
        raise refusal(key, value, f"a {kind} up to {most:,}")
    return value


def number(
    raw: Raw,
    key: str,
    default: float | None = None,
    most: float = LARGEST,
    least: float = -LARGEST,
) -> float:
    value: Any = raw.get(key)
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # false for NaN as well
        span = "" if least == -most else f" from {least:g} to {most:g}"
        raise refusal(key, value, f"a number{span}")
    return float(value)


def positive_number(raw: Raw, key: str, default: float | None = None) -> float:
    return number(raw, key, default, least=SMALLEST)


def positive_numbers(raw: Raw, key: str, count: int) -> tuple[float, ...]:
    values = raw.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise refusal(key, values, f"a list of {count:,} numbers")
    return tuple(positive_number({key: value}, key) for value in values)


def flag(raw: Raw, key: str, default: bool = False) -> bool:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value


def text(raw: Raw, key: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise refusal(key, value, "a string")
    return value


def mapping(raw: Raw, key: str) -> Raw:
    """An object; an empty one where there is none."""
    value = raw.get(key)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise refusal(key, value, "an object")
    return value


def token_ids(raw: Raw, key: str) -> tuple[int, ...]:
    """One id, a list of them, or none."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise refusal(key, value, "token ids")
    return tuple(dict.fromkeys(ids))


def refusal(key: str, value: Any, wanted: str) -> ModelError:
    return ModelError(
        f"The model's config has {key}={shown(value)} where {wanted} must be: download it again, "
        f"or choose another model."
    )
