"""Results of products that do not stay in a core's caches beside what is multiplied.

A row of them is written sixteen numbers at a time, with other rows between: to bring each line of
memory into a cache first, only to write all of it, takes a tenth of a long prompt's products.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.numba.sizes import LANES, TILE

LARGE = 1 << 19  # bytes


def is_large(out: Tensor) -> bool:
    """Whether kernels write past the caches, which takes whole lines. Of few tokens the results, a
    head's for one, are read at once."""
    line = LANES * out.itemsize
    is_much = out.nbytes >= LARGE and len(out) >= TILE
    return is_much and out.data_ptr() % line == 0 and out.stride(0) % LANES == 0
