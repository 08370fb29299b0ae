"""A linear layer whose matrix has four bits a weight, by whatever multiplies fastest."""

from __future__ import annotations

from functools import cache as memoise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.act_and_mul import act_and_mul
from quire.kernels.triton.int4.dequantise import dequantise
from quire.kernels.triton.int4.few import few_rows
from quire.kernels.triton.int4.many import many_rows

FEW, MANY = 64, 1024  # rows, at most; with more, the matrix is dequantised


def int4_linear(
    x: Tensor, matrix: Int4Tiles, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    """`F.linear` of x, in 16 bits, and the matrix; with an activation, `act_and_mul` of that."""
    rows = len(x)
    fast = _unpacks_fast(x.device) and matrix.scale.dtype == x.dtype
    if x.stride(1) != 1:
        x = x.contiguous()
    if 0 < rows <= FEW:
        return few_rows(x, matrix, bias, activation, fast)
    if rows == 0:
        out = x.new_empty(0, len(matrix.words))
    elif rows <= MANY:
        out = many_rows(x, matrix, bias, fast)
    else:
        out = F.linear(x, dequantise(matrix, x.dtype, fast), bias)
    return out if activation is None else act_and_mul(out, activation)


@memoise
def _unpacks_fast(device: torch.device) -> bool:
    """Whether the device adds and multiplies pairs of bfloat16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
