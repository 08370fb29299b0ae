"""Which folders callers may have loaded: those that are really below the configured one."""

from __future__ import annotations

import os
from pathlib import Path

from quire.api.server.errors import ApiError, bad_request


def folder_below(top: str, path: str) -> str:
    """The real path of an adapter's folder, given as it lies below `top`, or whole.

    Neither dots nor links lead out of `top`, nor do links to the files in the folder.
    """
    real_top = Path(os.path.realpath(os.path.expanduser(top)))
    try:
        real = Path(os.path.realpath(real_top / path))
        if real_top not in real.parents:
            raise _outside()
        if not real.is_dir():
            raise ApiError(
                404, f"There is no folder {path[:200]!r} for adapters.", param="lora_path"
            )
        for entry in real.iterdir():
            if real_top not in Path(os.path.realpath(entry)).parents:
                raise _outside()
    except (OSError, ValueError):
        raise bad_request(f"{path[:200]!r} cannot be read; check it.", param="lora_path") from None
    return str(real)


def _outside() -> ApiError:
    return ApiError(
        403,
        "lora_path must be a folder below the server's lora_folder, without links out of it.",
        code="forbidden",
        param="lora_path",
    )
