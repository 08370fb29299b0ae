"""In which order blocks are needed: one is as recently used as any that stands behind it.

An answer's blocks are written one after the other and may never be asked for: then each is newer
than the one before it, and yet of no use without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NONE = -1  # no row


def by_need(parents: Sequence[int]) -> Sequence[int]:
    """Rows, each before the row of its parent; else as they were, the least recently used first."""
    above = np.asarray(parents)
    if ((above > np.arange(len(above))) | (above == NONE)).all():
        return range(len(parents))
    placed = bytearray(len(parents))
    heads_first: list[int] = []
    for row in reversed(range(len(parents))):
        chain = []
        while row != NONE and not placed[row]:
            placed[row] = 1
            chain.append(row)
            row = parents[row]
        heads_first += reversed(chain)
    return heads_first[::-1]
