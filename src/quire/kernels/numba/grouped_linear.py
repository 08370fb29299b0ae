"""Products of few tokens each with the matrices of several experts, in one call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.numba.kernels import grouped_kernel


def grouped_linear(weights: Tensor, x: Tensor, sizes: list[int], threads: int) -> Tensor:
    """`x` `[tokens, size]`, of which the first tokens are the first expert's, and so on, times
    `weights` `[experts, rows, size]`; an even number of rows."""
    counts = np.array(sizes, dtype=np.int64)
    used = counts.nonzero()[0]
    groups = np.stack((used, (counts.cumsum() - counts)[used], counts[used]), axis=1)
    rows, size = weights.shape[1:]
    out = torch.empty((len(x), rows), dtype=x.dtype)
    grouped_kernel(
        x.dtype,
        threads,
        0,
        groups.ctypes.data,
        len(groups),
        rows,
        size,
        weights.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
    )
    return out
