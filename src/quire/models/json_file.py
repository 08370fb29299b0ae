"""A JSON object in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}, so it is not a model.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise ModelError(f"{path} is not valid JSON: download it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object: download it again.")
    return content
