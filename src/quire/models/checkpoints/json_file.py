"""A JSON object in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.checkpoints.git_lfs import refuse_pointer

MOST_BYTES = 64 << 20  # a config has kilobytes, the index of the largest checkpoint some megabytes


def read_json(path: Path) -> dict[str, Any]:
    content = _read(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object: download it again.")
    return content


def read_json_list(path: Path) -> list[Any]:
    content = _read(path)
    if not isinstance(content, list):
        raise ModelError(f"{path} does not hold a JSON list: download it again.")
    return content


def _read(path: Path) -> Any:
    try:
        return json.loads(read_text(path, MOST_BYTES))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}, so it is not a model.") from None
    except (ValueError, RecursionError):  # RecursionError: brackets within brackets without end
        raise ModelError(f"{path} is not valid JSON: download it again.") from None


def read_text(path: Path, most_bytes: int) -> str:
    """A small file's text; UnicodeDecodeError and FileNotFoundError are left to the caller."""
    try:
        if path.exists() and not path.is_file():  # one that is a pipe would never end
            raise ModelError(f"{path} is not a file: download the model again.")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(content) > most_bytes:
        raise ModelError(
            f"{path} is larger than {most_bytes >> 10:,} KiB, so it is not what its name says: "
            f"download it again."
        )
    refuse_pointer(path, content)
    return content.decode("utf-8")
