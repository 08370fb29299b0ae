"""From numbers to codes and scales: how `--quantization` and dummy weights are made.

Each function takes float32 rows `[rows, columns]` and returns the codes first.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.dequantise import E2M1, E8M0_BIAS, pack_nibbles, spread
from quire.kernels.fp8 import FP8
from quire.kernels.fp8 import LARGEST as FP8_LARGEST

TINY = torch.finfo(torch.float32).tiny
FP4_LARGEST = E2M1[-1]
# Of the scale at which a group's largest number has the last code: a smaller one rounds the many
# small numbers better, and cuts the largest.
SHRUNK = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)


def to_fp8(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """e4m3, with a scale for each block of `rows` by `columns`."""
    scale = largest_in_blocks(x, rows, columns) / FP8_LARGEST
    scaled = x / over_blocks(scale.clamp(min=TINY), rows, columns, x)
    return scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8), scale


def to_int8(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    scale = largest_in_blocks(x, rows, columns) / 127
    scaled = x / over_blocks(scale.clamp(min=TINY), rows, columns, x)
    return scaled.round_().clamp_(-127, 127).to(torch.int8), scale


def to_groups(x: Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unsigned codes around the middle one, and for each group that scale of a few which leaves
    the least squared error.

    There is one code more below zero than above. A negative scale gives it to positive numbers, so
    the number that is largest in size has it, whatever its sign.
    """
    middle = 1 << (bits - 1)
    groups = x.unflatten(1, (-1, group))
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    extreme = torch.where(-lowest >= highest, lowest, highest)
    best_error = torch.full_like(extreme, torch.inf)
    best_scale = torch.zeros_like(extreme)
    for shrunk in SHRUNK:
        scale = kept_in(extreme * (-shrunk / middle), scale_dtype)
        rounded = rounded_codes(groups, scale, middle) * scale
        error = (rounded - groups).square().sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    codes = rounded_codes(groups, best_scale, middle) + middle
    return codes.to(torch.uint8).flatten(1), best_scale.squeeze(-1).to(scale_dtype)


def to_nibble_groups(x: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scale = to_groups(x, 4, group, scale_dtype)
    return pack_nibbles(codes), scale


def rounded_codes(groups: Tensor, scale: Tensor, middle: int) -> Tensor:
    """Signed: from `-middle` to `middle - 1`."""
    safe = torch.where(scale.abs() < TINY, torch.ones_like(scale), scale)
    return (groups / safe).round_().clamp_(-middle, middle - 1)


def kept_in(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As it will be read again."""
    return scale.to(dtype).float()


def to_mxfp4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """E2M1 codes, two a byte, and for each group a power of two as a byte."""
    groups = x.unflatten(1, (-1, group))
    largest = groups.abs().amax(-1).clamp(min=TINY)
    exponent = (largest / FP4_LARGEST).log2().ceil().clamp(-E8M0_BIAS, E8M0_BIAS)
    codes = nearest_fp4(groups / exponent.exp2().unsqueeze(-1)).flatten(1)
    return pack_nibbles(codes), (exponent + E8M0_BIAS).to(torch.uint8)


def to_nvfp4(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """E2M1 codes, two a byte; for each group an e4m3 scale, and for each row one over all."""
    groups = x.unflatten(1, (-1, group))
    largest = groups.abs().amax(-1)
    over_all = (largest.amax(-1, keepdim=True) / (FP4_LARGEST * FP8_LARGEST)).clamp(min=TINY)
    scale = (largest / (FP4_LARGEST * over_all)).clamp(max=FP8_LARGEST).to(FP8)
    steps = (scale.float() * over_all).clamp(min=TINY)
    codes = nearest_fp4(groups / steps.unsqueeze(-1)).flatten(1)
    return pack_nibbles(codes), scale, over_all


def nearest_fp4(x: Tensor) -> Tensor:
    middles = [(low + high) / 2 for low, high in pairwise(E2M1)]
    codes = torch.bucketize(x.abs(), x.new_tensor(middles))
    return (codes + 8 * (x < 0)).to(torch.uint8)


def largest_in_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """The largest size of a number in each block; those at the ends may be smaller."""
    height, width = x.shape
    padded = F.pad(x.abs(), (0, -width % columns, 0, -height % rows))
    blocks: Tensor = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amax(dim=(1, 3))


def over_blocks(scale: Tensor, rows: int, columns: int, x: Tensor) -> Tensor:
    """The scale of each number of `x`."""
    wide = spread(scale, columns, x.shape[1])
    return wide.repeat_interleave(rows, dim=0)[: len(x)] if rows > 1 else wide
