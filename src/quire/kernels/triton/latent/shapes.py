"""How large programs of latent attention are."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Of a program: its rows, tokens of a tile, warps, stages of its loop; and how many programs
    keep a processor busy."""

    rows: int
    tile: int
    warps: int
    stages: int
    programs: int
    for_hopper: bool = False  # of a kernel of its own


HOPPER_PAIRS = Shape(64, 128, 4, 2, 1, for_hopper=True)  # of `hopper_pairs.py`
HOPPER_FEW = tuple(  # of `hopper_few.py`
    Shape(rows, 64, 4, 2, 1, for_hopper=True) for rows in (16, 32)
)
EXACT = Shape(16, 16, 4, 2, 2)  # float32, without tensor cores
LEAST_ROWS, MOST_ROWS = 16, 32  # otherwise: more sums than these do not fit into registers
