"""Figures as a table for people and as JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.report.sample import Sample, number
from quire.errors import ConfigError

Row = dict[str, Any]
STDOUT = "-"


def table(rows: Sequence[Row]) -> str:
    """Columns as wide as what they hold; numbers to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    numeric = [any(isinstance(row.get(name), (int, float)) for row in rows) for name in names]

    def line(values: Sequence[str]) -> str:
        padded = (
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(names), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def check_json_path(path: str | None) -> None:
    """Check the path before anything is measured, so that no figures are lost at the end."""
    if path not in (None, STDOUT) and not Path(str(path)).absolute().parent.is_dir():
        raise ConfigError(f"--json {path} is in a folder that does not exist; make it first.")


def publish(result: dict[str, Any], json_path: str | None) -> None:
    """One table, above it what it shows, below it remarks; a profile has a table of its own."""
    parts = [f"{result['says']}\n{result['on']}", table(result["rows"])]
    parts += ["\n".join(result["notes"])] if result["notes"] else []
    if profile := result.get("profile"):
        parts += [profile["says"], table(profile["costs"])]
    show(parts, json_path)
    write_json(json_path, result)


def show(parts: Sequence[str], json_path: str | None) -> None:
    """For people: on stdout, unless that is for the JSON."""
    print("\n\n".join(parts), file=sys.stderr if json_path == STDOUT else sys.stdout)


def write_json(path: str | None, result: dict[str, Any]) -> None:
    _write(path, json.dumps(result, indent=1, default=_plain))


def write_json_lines(path: str | None, results: Sequence[dict[str, Any]]) -> None:
    """One line each, for tools that read line by line."""
    _write(path, "\n".join(json.dumps(result, default=_plain) for result in results))


def _write(path: str | None, text: str) -> None:
    if path is None:
        return
    if path == STDOUT:
        print(text)
        return
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--json {path} cannot be written: {reason}; use another.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Sample):
        return value.as_dict()
    raise TypeError(f"{type(value).__name__} has no place in JSON")
