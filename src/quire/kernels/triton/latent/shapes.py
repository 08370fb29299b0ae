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


HOPPER = Shape(64, 64, 8, 2, 1, for_hopper=True)  # of `hopper.py`
HOPPER_PAIRS = HOPPER._replace(tile=128, warps=4)  # of `hopper_pairs.py`
HOPPER_FEW = tuple(HOPPER._replace(rows=rows, warps=4) for rows in (16, 32))  # of `hopper_few.py`
EXACT = Shape(16, 16, 4, 2, 2)  # float32, without tensor cores
LEAST_ROWS, MOST_ROWS = 16, 32  # otherwise: more sums than these do not fit into registers
