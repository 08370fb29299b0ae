"""A linear layer whose matrix has four bits a weight, by whatever multiplies fastest."""

from __future__ import annotations

import math
from functools import cache as memoise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.int4_tiles import COLUMNS, ROWS, Int4Tiles
from quire.kernels.triton.act_and_mul import act_and_mul
from quire.kernels.triton.int4 import few_digits
from quire.kernels.triton.int4.dequantise import dequantise
from quire.kernels.triton.int4.few import few_rows
from quire.kernels.triton.int4.many import many_rows
from quire.kernels.triton.small_dots import has_small_dots
from quire.kernels.triton.tried import tried

FEW, FEW_ON_HOPPER = 8, 4  # rows
MANY = 4096  # with more rows, the matrix is dequantised


def int4_linear(
    x: Tensor, matrix: Int4Tiles, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    """`F.linear` of x, in 16 bits, and the matrix; with an activation, `act_and_mul` of that."""
    if len(x) == 0:
        return x.new_empty(0, len(matrix.words) // (1 if activation is None else 2))
    fast = matrix.scale.dtype == x.dtype and _capability(x.device) >= (9, 0)
    on_hopper = fast and _has_hopper_kernel(x, matrix)
    if x.stride(1) != 1:
        x = x.contiguous()
    has_few = has_small_dots(x.device)
    if has_few and few_digits.fits(x, matrix):
        return few_digits.few_rows(x, matrix, bias, activation, _has_bytes(x.device))
    if has_few and len(x) <= (FEW_ON_HOPPER if on_hopper else FEW):
        return few_rows(x, matrix, bias, activation, fast)
    if len(x) > MANY:
        out = F.linear(x, dequantise(matrix, x.dtype, fast), bias)
    elif on_hopper:
        out = _many_on_hopper(x, matrix, bias)
    else:
        out = many_rows(x, matrix, bias, fast)
    return out if activation is None else act_and_mul(out, activation)


def _has_hopper_kernel(x: Tensor, matrix: Int4Tiles) -> bool:
    if _capability(x.device) != (9, 0):
        return False
    return _can_be_built(x.device, x.dtype, matrix.group, matrix.zero is not None)


@tried("Four-bit products are")
def _can_be_built(device: torch.device, dtype: torch.dtype, group: int, has_zeros: bool) -> None:
    """One row, and one row of tiles."""
    from quire.kernels.triton.int4 import hopper_many

    columns = math.lcm(COLUMNS, group)
    words = torch.zeros(ROWS, columns // 4, dtype=torch.int16, device=device)
    scale = torch.zeros(ROWS, columns // group, dtype=dtype, device=device)
    zero = scale.to(torch.uint8) if has_zeros else None
    hopper_many.many_rows(scale.new_zeros(1, columns), Int4Tiles(words, scale, zero, group), None)


def _many_on_hopper(x: Tensor, matrix: Int4Tiles, bias: Tensor | None) -> Tensor:
    from quire.kernels.triton.hopper_products.many import can_read
    from quire.kernels.triton.int4 import hopper_many

    if not can_read(x):
        x = x.contiguous()
    return hopper_many.many_rows(x, matrix, bias)


def _has_bytes(device: torch.device) -> bool:
    """Whether it has the instructions that make bytes of both factors."""
    return _capability(device) >= (8, 0) and torch.version.cuda is not None


@memoise
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
