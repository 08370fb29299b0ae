"""How much a test does.

`make test` does what finds a mistake within minutes; `make test-long` does all of it: more prompts,
more examples, longer lives. What is asserted is the same.
"""

from __future__ import annotations

import os
from typing import TypeVar

IS_LONG = os.environ.get("LONG_TESTS") == "1"

T = TypeVar("T")


def effort(short: T, long: T) -> T:
    """Of two sizes of one test, that of this run."""
    return long if IS_LONG else short


def examples(count: int) -> int:
    """Of so many examples that Hypothesis tries, a short run has a quarter: each tries others."""
    return effort(count // 4, count)
