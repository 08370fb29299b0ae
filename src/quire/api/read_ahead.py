"""Texts are tokenized while those before them are computed.

a thread   read 1 ─ read 2 ─ read 3 ─ …
the call            submit 1, step ─ submit 2, step ─ …
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

FIRST = 128  # texts of the first part: few, because nothing is computed before they are read
PART = 512  # of each other part: about a step of a GPU's

T = TypeVar("T")
S = TypeVar("S")


def read_ahead(read: Callable[[Sequence[S]], T], inputs: Sequence[S]) -> Generator[T, None, None]:
    """What `read` makes of the inputs, part by part. To close this ends the reading, too."""
    cuts = [0, *range(FIRST, len(inputs), PART), len(inputs)]
    parts = [inputs[start:end] for start, end in pairwise(cuts) if start < end]
    if len(parts) < 2:
        yield from map(read, parts)
        return
    with ThreadPoolExecutor(1, "quire-read-ahead") as pool:
        yield from pool.map(read, parts)
