"""A linear layer, computed the way round that the CPU's BLAS likes better."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

# On ARM, torch multiplies float32 with OpenBLAS, whose kernels are shaped for a tall left matrix.
# With a batch of decodes that is the weight, not the input: weight @ x.T is 15 to 40 % faster than
# x @ weight.T from 4 to 64 rows, level above, and slower below.
_TALL_WEIGHT = platform.machine() in ("aarch64", "arm64")
_FEWEST_ROWS, _MOST_ROWS = 4, 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; the result may be a transposed view, which what follows reads as quickly."""
    if (
        _TALL_WEIGHT
        and x.dim() == 2
        and _FEWEST_ROWS <= x.shape[0] <= _MOST_ROWS
        and x.device.type == "cpu"
        and x.dtype == torch.float32
    ):
        out = torch.mm(weight, x.t()).t()
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)
