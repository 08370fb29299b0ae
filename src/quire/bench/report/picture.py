"""Pictures of figures: whether there will be one, and writing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def check_plot_path(path: str | None) -> None:
    """Before anything is measured: whether there will be a picture."""
    if path is None:
        return
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(FORMATS)}.")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path} is in a folder that does not exist; make it first.")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with pip install 'quire[plot]'.")


def save(figure: Any, path: str, dpi: int) -> None:
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--plot {path} cannot be written: {reason}; use another.") from None
