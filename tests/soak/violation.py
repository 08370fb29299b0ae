"""What a soak looks for: something that never may happen, in one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable


class Violation(Exception):
    """The run ends with this sentence."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise Violation(sentence)


def require_soon(happens: Callable[[], object], seconds: float, sentence: str) -> None:
    """For what other threads have still to do."""
    deadline = time.monotonic() + seconds
    while not happens():
        require(time.monotonic() < deadline, sentence)
        time.sleep(0.01)
