"""Results of products that are larger than a core's caches.

A row of them is written sixteen numbers at a time, with other rows between: to bring each line of
memory into a cache first, only to write all of it, takes a tenth of a long prompt's products.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.numba.sizes import LANES

LARGE = 1 << 19  # bytes


def is_large(out: Tensor) -> bool:
    """Whether kernels write past the caches, which takes whole lines."""
    line = LANES * out.itemsize
    return out.nbytes >= LARGE and out.data_ptr() % line == 0 and out.stride(0) % LANES == 0
