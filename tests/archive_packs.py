"""The packs that an archive has on a mount."""

from __future__ import annotations

import contextlib
from pathlib import Path


def packs(mount: Path) -> list[Path]:
    while True:
        with contextlib.suppress(FileNotFoundError):  # a folder was swept while it was listed
            found = mount.glob("quire-1/*/*")
            return sorted(path for path in found if not path.name.startswith("."))
