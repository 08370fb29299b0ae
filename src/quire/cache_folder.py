"""Where Quire keeps what it would rather not fetch or work out twice."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`QUIRE_CACHE`, else `quire` in the user's cache folder."""
    if chosen := os.environ.get("QUIRE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"
