"""Rows of codes and scales to numbers, in one pass: for formats without a product of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import cdiv

_WIDTH = 1024


def dequantise(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_index: Tensor | None,
    columns: int,
    group: int,
    bits: int,
    is_float: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`[rows, columns]` of `kernels/dequantise.py`'s formats: codes of four bits lie two a byte.

    `is_float`: they are E2M1; else unsigned, and around the middle where there are no zeros.
    `group_index`: the group of each column, where these are not runs of `group`.
    """
    rows = len(codes)
    out = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    _dequantise[(rows, cdiv(columns, _WIDTH))](
        codes,
        scales,
        codes if zeros is None else zeros,
        codes if group_index is None else group_index,
        out,
        codes.stride(0),
        scales.stride(0),
        columns,
        group,
        BITS=bits,
        FLOAT=is_float,
        ZEROS=zeros is not None,
        INDEXED=group_index is not None,
        WIDTH=_WIDTH,
    )
    return out


@triton.jit
def _dequantise(
    codes,
    scales,
    zeros,
    group_index,
    out,
    row_bytes,
    groups,
    columns,
    group,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    ZEROS: tl.constexpr,
    INDEXED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = column < columns
    per_byte: tl.constexpr = 8 // BITS
    code = tl.load(codes + row * row_bytes + column // per_byte, mask=live, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> (column % 2 * 4)) & 15
    its_group = column // group
    if INDEXED:
        its_group = tl.load(group_index + column, mask=live, other=0)
    scale = tl.load(scales + row * groups + its_group, mask=live, other=0.0).to(tl.float32)
    if FLOAT:
        exponent = (code >> 1) & 3
        fraction = code & 1
        quarters = tl.where(exponent == 0, fraction * 2, (fraction + 2) << exponent)
        number = quarters.to(tl.float32) * tl.where(code >= 8, -0.25, 0.25)
    elif ZEROS:
        zero = tl.load(zeros + row * groups + its_group, mask=live, other=0)
        number = code.to(tl.float32) - zero.to(tl.float32)
    else:
        number = code.to(tl.float32) - (1 << (BITS - 1))
    tl.store(out + row * columns + column, (number * scale).to(out.dtype.element_ty), mask=live)
