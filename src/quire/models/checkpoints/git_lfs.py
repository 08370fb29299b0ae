"""Files of a repository that Git LFS has not fetched: a few lines lie in the place of each."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelError

POINTER = b"version https://git-lfs"  # what such a file begins with


def refuse_pointer(path: Path, beginning: bytes) -> None:
    if beginning.startswith(POINTER):
        raise ModelError(
            f"{path} is a pointer of Git LFS, not the file itself: fetch it with git lfs pull in "
            f"its folder, or download the model again."
        )
