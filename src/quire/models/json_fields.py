"""Fields of a config.json, read with a check and a sentence for whoever has to mend the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError

Raw = Mapping[str, Any]


def whole_number(raw: Raw, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has {key}={value!r} where a positive whole number must be.")
    return value


def number(raw: Raw, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"config.json has {key}={value!r} where a number must be.")
    return float(value)


def token_ids(raw: Raw, key: str) -> tuple[int, ...]:
    """One id, a list of them, or none."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"config.json has {key}={value!r} where token ids must be.")
    return tuple(dict.fromkeys(ids))
