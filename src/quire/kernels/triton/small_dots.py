"""Whether Triton multiplies tiles of eight columns: before its version 3.5, they have 16 at least.

Kernels for few rows do. Where they cannot be built, those for many rows take their place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.tried import tried


@tried("Products of few rows are")
def has_small_dots(device: torch.device) -> None:
    x = torch.zeros(16, 16, dtype=torch.float16, device=device)
    _multiply[(1,)](x, torch.empty(16, 8, dtype=torch.float32, device=device))


@triton.jit
def _multiply(x, out):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    left = tl.load(x + row * 16 + tl.arange(0, 16)[None, :])
    tl.store(out + row * 8 + column, tl.dot(left, tl.load(x + row * 16 + column)))
