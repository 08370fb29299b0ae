"""Activations to codes, by themselves or as the last thing that another kernel does with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.codes import CodeFormat, Codes, with_spare
from quire.kernels.quantise import INT8_LARGEST
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import next_power_of_2
from quire.kernels.triton.write import quantise as quantise_rows

_INT8_LARGEST: tl.constexpr = tl.constexpr(INT8_LARGEST)
_ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2**23)  # near it, float32 has whole numbers alone


def room_for(rows: int, columns: int, form: CodeFormat, like: Tensor) -> Codes:
    """Codes to be written, of numbers like those of a tensor; by rows, there are rows to spare."""
    there = with_spare(rows) if form.group is None else rows
    values = torch.empty((there, columns), dtype=form.dtype, device=like.device)
    scales = torch.empty((form.groups(columns), there), dtype=torch.float32, device=like.device)
    return Codes(values[:rows], scales.t()[:rows], like.dtype, there - rows)


def quantise(x: Tensor, form: CodeFormat) -> Codes:
    """Of `[tokens, columns]`; a program takes a row."""
    rows, columns = x.shape
    out = room_for(rows, columns, form, x)
    width = next_power_of_2(columns)
    if rows:
        _quantise[(rows,)](
            x,
            out.values,
            out.scales,
            x.stride(0),
            rows,
            COLUMNS=columns,
            WIDTH=width,
            GROUP=form.group or width,
            num_warps=max(1, min(16, width // 512)),
            **pdl_launch(x.device),
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _quantise(
    x,
    values,
    scales,
    x_stride,
    rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    trigger_then_wait(PDL)
    numbers = tl.load(x + row * x_stride + lane, mask=lane < COLUMNS, other=0.0)
    write_codes(numbers, values, scales, row, rows, 0, COLUMNS, WIDTH, GROUP)


@triton.jit
def write_codes(
    x,
    values,
    scales,
    row,
    rows,
    first,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Codes and scales of `WIDTH` numbers of a row, from column `first` on."""
    count: tl.constexpr = WIDTH // GROUP
    numbers = tl.reshape(x.to(tl.float32), (count, GROUP))
    if values.dtype.element_ty == tl.int8:
        codes, scale = _quantise_to_int8(numbers)
    else:
        codes, scale = quantise_rows(numbers)
    group = tl.arange(0, count)
    column = first + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(values + row * COLUMNS + column, codes, mask=column < COLUMNS)
    group += first // GROUP
    tl.store(scales + group * rows + row, scale, mask=group * GROUP < COLUMNS)


@triton.jit
def _quantise_to_int8(x):
    """As `write.quantise`, to whole numbers, halves to even ones."""
    largest = tl.max(tl.abs(x), 1)
    factor = tl.where(largest > 0.0, _INT8_LARGEST / largest, 0.0)
    return (x * factor[:, None] + _ROUNDER - _ROUNDER).to(tl.int8), largest / _INT8_LARGEST
