"""Weights to fp8 while a model is loaded: a block's numbers are read once, however many scales are
tried on them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import FP8, LARGEST
from quire.kernels.triton.attention.fp8_pairs import has_conversion
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_MOST = 1 << 15  # numbers of a block that a program holds
_LARGEST: tl.constexpr = tl.constexpr(LARGEST)
_TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)


def fits(x: Tensor, rows: int, columns: int) -> bool:
    """Whether there is a kernel for such blocks on this device."""
    held = next_power_of_2(rows) * next_power_of_2(columns)
    return held <= _MOST and (not x.is_cuda or has_conversion(x.device))


def fit_to_fp8(x: Tensor, rows: int, columns: int, tries: int) -> tuple[Tensor, Tensor]:
    """Codes and scales, where it `fits`: of so many scales within an octave, the best."""
    height, width = x.shape
    blocks = cdiv(height, rows), cdiv(width, columns)
    codes = torch.empty((height, width), dtype=FP8, device=x.device)
    scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    if x.numel():
        _fit[blocks](
            x.contiguous(),
            codes,
            scales,
            height,
            width,
            TRIES=tries,
            ROWS=rows,
            COLUMNS=columns,
            HEIGHT=next_power_of_2(rows),
            WIDTH=next_power_of_2(columns),
            num_warps=16,
        )
    return codes, scales


@triton.jit(do_not_specialize=["height"])
def _fit(
    x,
    codes,
    scales,
    height,
    width,
    TRIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    down, across = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + down
    column = tl.program_id(1) * COLUMNS + across
    live = (down < ROWS) & (row < height) & (across < COLUMNS) & (column < width)
    place = row * width + column
    numbers = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(numbers), 1), 0)
    best = largest / _LARGEST
    least = float("inf")
    for i in range(TRIES):
        scale = largest * (tl.exp2(i / TRIES) / _LARGEST)
        scaled = numbers / tl.maximum(scale, _TINY)
        error = scaled.to(tl.float8e4nv).to(tl.float32) - scaled
        size = tl.sqrt(tl.sum(tl.sum(error * error, 1), 0)) * scale
        best = tl.where(size < least, scale, best)
        least = tl.minimum(size, least)
    scaled = numbers / tl.maximum(best, _TINY)
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
    tl.store(codes + place, scaled.to(tl.float8e4nv), mask=live)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), best)
