"""A linear layer whose matrix is of one of GGUF's types, by whatever multiplies fastest."""

from __future__ import annotations

from functools import cache as memoise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_tiles import ROWS, WIDE, GGUFTiles, TileType, to_tiles
from quire.kernels.triton.gguf import few, few_digits
from quire.kernels.triton.gguf.many import many_rows
from quire.kernels.triton.gguf.rows import dequantise
from quire.kernels.triton.small_dots import has_small_dots
from quire.kernels.triton.tried import tried

MANY, MANY_ON_HOPPER = 512, 4096  # rows; for more, the matrix is dequantised
ALIGNED = 16  # bytes: where rows begin that hardware copies


def gguf_linear(
    x: Tensor, matrix: GGUFTiles, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """`F.linear` of x, in 16 bits, and the matrix: a new tensor, or columns of `out`."""
    if out is None:
        out = x.new_empty(len(x), matrix.rows)
    if len(x) == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    has_few = len(x) <= few.MOST_ROWS and has_small_dots(x.device)
    if has_few and few_digits.fits(len(x), matrix.kind):
        few_digits.few_rows(x, matrix, bias, out, _is_fast(x.device))
    elif has_few:
        few.few_rows(x, matrix, bias, out, _is_fast(x.device))
    elif len(x) <= MANY_ON_HOPPER and _has_hopper_kernel(x, matrix):
        _many_on_hopper(x, matrix, bias, out)
    elif len(x) <= MANY:
        many_rows(x, matrix, bias, out, _is_fast(x.device))
    else:
        numbers = dequantise(matrix, x.dtype)
        if out.is_contiguous() and bias is None:
            torch.mm(x, numbers.T, out=out)
        else:
            out.copy_(F.linear(x, numbers, bias))
    return out


def _many_on_hopper(x: Tensor, matrix: GGUFTiles, bias: Tensor | None, out: Tensor) -> None:
    from quire.kernels.triton.gguf import hopper_many
    from quire.kernels.triton.hopper_products.many import can_read

    if not can_read(x):
        x = x.contiguous()
    hopper_many.many_rows(x, matrix, bias, out)


def _has_hopper_kernel(x: Tensor, matrix: GGUFTiles) -> bool:
    """Whether this GPU is one that copies rows of x, once they lie side by side."""
    if _capability(x.device) != (9, 0) or x.shape[1] * x.itemsize % ALIGNED != 0:
        return False
    return _can_be_built(x.device, x.dtype, matrix.kind)


@tried("GGUF products are")
def _can_be_built(device: torch.device, dtype: torch.dtype, kind: TileType) -> None:
    """One row, and one row of tiles."""
    from quire.kernels.triton.gguf import hopper_many

    block = TYPES[kind.name]
    stored = torch.zeros(ROWS, WIDE // block.values * block.bytes, dtype=torch.uint8, device=device)
    x = torch.zeros(1, WIDE, dtype=dtype, device=device)
    hopper_many.many_rows(x, to_tiles(kind.name, stored), None, x.new_empty(1, ROWS))


def _is_fast(device: torch.device) -> bool:
    """Whether it has the instructions that unpack."""
    return _capability(device) >= (8, 0)


@memoise
def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
