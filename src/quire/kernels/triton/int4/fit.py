"""Weights to four bits while a model is loaded: a group's numbers are read once, however many
scales are tried on them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import cdiv

_TOGETHER = 2048  # numbers of a program
_MIDDLE: tl.constexpr = tl.constexpr(8.0)
_ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2**23)  # near it, float32 has whole numbers alone


def fits(columns: int, group: int) -> bool:
    """Whether there is a kernel for such groups."""
    return columns % group == 0 and 2 <= group <= _TOGETHER and group & (group - 1) == 0


def fit_to_groups(
    x: Tensor, group: int, scale_dtype: torch.dtype, shrunk: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Codes around the middle one, two a byte, and scales, where it `fits`: of those that the
    largest number of a group has, `shrunk` by each of these, the best."""
    rows, columns = x.shape
    groups = rows * columns // group
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, columns // group), dtype=scale_dtype, device=x.device)
    together = _TOGETHER // group
    if groups:
        _fit[(cdiv(groups, together),)](
            x.contiguous(), codes, scales, groups, GROUP=group, TOGETHER=together, SHRUNK=shrunk
        )
    return codes, scales


@triton.jit(do_not_specialize=["groups"])
def _fit(
    x,
    codes,
    scales,
    groups,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    SHRUNK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    live = group < groups
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    numbers = tl.load(x + place, mask=live[:, None], other=0.0).to(tl.float32)
    low, high = tl.min(numbers, 1), tl.max(numbers, 1)
    extreme = tl.where(-low >= high, low, high)
    squared = numbers * numbers
    counts = squared + (tl.sum(squared, 1) / GROUP)[:, None]
    best = tl.zeros((TOGETHER,), tl.float32)
    least = tl.full((TOGETHER,), float("inf"), tl.float32)
    for shrunk in tl.static_range(len(SHRUNK)):
        scale = extreme * (-SHRUNK[shrunk] / _MIDDLE)
        scale = scale.to(scales.dtype.element_ty).to(tl.float32)
        error = (_codes(numbers, scale) - _MIDDLE) * scale[:, None] - numbers
        size = tl.sum(error * error * counts, 1)
        best = tl.where(size < least, scale, best)
        least = tl.minimum(size, least)
    pairs = tl.reshape(_codes(numbers, best).to(tl.uint8), (TOGETHER, GROUP // 2, 2))
    lower, upper = tl.split(pairs)
    place = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    tl.store(codes + place, lower | (upper << 4), mask=live[:, None])
    tl.store(scales + group, best.to(scales.dtype.element_ty), mask=live)


@triton.jit
def _codes(numbers, scale):
    """From 0 to 15, halves to even ones."""
    safe = tl.where(scale == 0.0, 1.0, scale)
    found = tl.div_rn(numbers, safe[:, None] + tl.zeros_like(numbers)) + _MIDDLE
    return tl.minimum(tl.maximum(found + _ROUNDER - _ROUNDER, 0.0), 15.0)
