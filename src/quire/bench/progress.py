"""A bar of runs: it moves only between them, so that it costs none of them anything."""

from __future__ import annotations

from typing import Any


def runs_bar(what: str, total: int, unit: str = "run") -> Any:
    """Shown on a terminal only; `update` after each run."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, leave=False, disable=None)
