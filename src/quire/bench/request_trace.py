"""Traces of requests: a file with a JSON object on each line, read one line at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from quire.errors import ConfigError

LONGEST_LINE = 64 << 20  # bytes; a file without lines must not fill the memory

BLOCK_TOKENS = 512  # as the published traces count

Name = int | str


def read_records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line that is not empty, with the words that say where it stands."""
    try:
        with open(path, "rb") as file:
            lines = iter(partial(file.readline, LONGEST_LINE), b"")
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"line {number} of --trace {path}"
                    yield where, _record(line, where)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--trace {path} cannot be read: {reason}; give another.") from None


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not JSON; give one object a line.") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is no JSON object; give one object a line.")
    return record


def block_names(record: dict[str, Any], where: str) -> list[Name]:
    names = record.get("hash_ids")
    if not isinstance(names, list) or not all(type(name) in (int, str) for name in names):
        raise ConfigError(f"{where} has no list `hash_ids` of numbers or words; see --help.")
    return names


def number(record: dict[str, Any], name: str, where: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ConfigError(f"{where} has no number `{name}` from 0; see --help.")
    return float(value)
