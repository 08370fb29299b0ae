"""From numbers to codes and scales: how `--quantization` and dummy weights are made.

Each function takes float32 rows `[rows, columns]` and returns the codes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.dequantise import E2M1, E8M0_BIAS, pack_nibbles, spread
from quire.kernels.fp8 import FP8
from quire.kernels.fp8 import LARGEST as FP8_LARGEST

TINY = torch.finfo(torch.float32).tiny
FP4_LARGEST = E2M1[-1]
INT8_LARGEST = 127.0  # in size: -128 is left out
# Of the scale at which a group's largest number has the last code: a smaller one rounds the many
# small numbers better, and cuts the largest.
SHRUNK = (1.0, 1.04, 0.96, 0.92, 0.88)
ENDS = (1.0, 0.95, 0.9)  # the same, for the lowest and the highest number apart
OCTAVE = tuple(2 ** (i / 8) for i in range(8))  # of the scale that uses all of fp8's range
TILE = 1 << 17  # numbers that a CPU tries scales on at once: they stay in its cache


def to_fp8(x: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    """e4m3, with a scale for each block of `rows` by `columns`: of a few the one that leaves the
    least squared error. At twice a scale numbers are rounded as they were, so that all there is to
    try lies within a factor of two."""
    if x.is_cuda:
        from quire.kernels.triton.codes.fit import fit_to_fp8, fits

        if fits(x, rows, columns):
            return fit_to_fp8(x, rows, columns, len(OCTAVE))
    return in_tiles(partial(_to_fp8, rows=rows, columns=columns), x, rows)


def _to_fp8(x: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    largest = in_blocks(x.abs(), rows, columns).amax(dim=(1, 3))
    least: Tensor | None = None
    for factor in OCTAVE:
        scale = largest * (factor / FP8_LARGEST)
        scaled = x / over_blocks(scale.clamp(min=TINY), rows, columns, x)
        error = in_blocks(scaled.to(FP8).float().sub_(scaled), rows, columns)
        size = torch.linalg.vector_norm(error, dim=(1, 3)) * scale
        if least is None:
            least, best = size, scale
            continue
        best = torch.where(size < least, scale, best)
        least = torch.minimum(size, least)
    scaled = x / over_blocks(best.clamp(min=TINY), rows, columns, x)
    return scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8), best


def to_int8(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    scale = in_blocks(x.abs(), rows, columns).amax(dim=(1, 3)) / INT8_LARGEST
    scaled = x / over_blocks(scale.clamp(min=TINY), rows, columns, x)
    return scaled.round_().clamp_(-INT8_LARGEST, INT8_LARGEST).to(torch.int8), scale


def to_groups(
    x: Tensor, bits: int, group: int, has_zeros: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Unsigned codes, two a byte if they have four bits; of a few scales for each group the one
    that leaves the least squared error; and the codes of zero, if groups have their own.

    Errors of large numbers count more (by their squares): the scales that leave the least plain
    squared error cut large numbers, and had the worst perplexity (docs/models.md).
    """
    if x.is_cuda and bits == 4 and not has_zeros:
        from quire.kernels.triton.int4.fit import fit_to_groups, fits

        if fits(x.shape[1], group):
            return fit_to_groups(x, group, scale_dtype, SHRUNK)
    quantise = partial(
        _to_groups, bits=bits, group=group, has_zeros=has_zeros, scale_dtype=scale_dtype
    )
    codes, *others = in_tiles(quantise, x)
    return (pack_nibbles(codes) if bits == 4 else codes, *others)


def _to_groups(
    x: Tensor, bits: int, group: int, has_zeros: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    groups = x.unflatten(1, (-1, group))
    last = (1 << bits) - 1
    squared = groups.square()
    counts = squared + squared.mean(-1, keepdim=True)
    least: Tensor | None = None
    for scale, zero in (_with_zeros if has_zeros else _around_middle)(groups, last, scale_dtype):
        error = _codes(groups, scale, zero, last).sub_(zero).mul_(scale).sub_(groups)
        counted = error.square_().mul_(counts).sum(-1, keepdim=True)
        if least is None:
            least, best_scale, best_zero = counted, scale, zero
            continue
        better = counted < least
        least = torch.where(better, counted, least)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    codes = _codes(groups, best_scale, best_zero, last).to(torch.uint8).flatten(1)
    zeros = (best_zero.squeeze(-1).to(torch.uint8),) if has_zeros else ()
    return (codes, best_scale.squeeze(-1).to(scale_dtype), *zeros)


def _codes(groups: Tensor, scale: Tensor, zero: Tensor, last: int) -> Tensor:
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (groups / safe).add_(zero).round_().clamp_(0, last)


def _around_middle(
    groups: Tensor, last: int, scale_dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """There is one code more below the middle than above. A negative scale gives it to positive
    numbers: the number that is largest in size has it, whatever its sign."""
    middle = (last + 1) // 2
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    extreme = torch.where(-low >= high, low, high)
    zero = torch.full_like(extreme, middle)
    for shrunk in SHRUNK:
        yield (extreme * (-shrunk / middle)).to(scale_dtype).float(), zero


def _with_zeros(
    groups: Tensor, last: int, scale_dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """From the lowest to the highest number, either of which may be cut; zero itself has a code."""
    low = groups.amin(-1, keepdim=True).clamp_(max=0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0)
    for below, above in product(ENDS, ENDS):
        scale = ((high * above - low * below) / last).to(scale_dtype).float()
        zero = (low * -below / scale.clamp(min=TINY)).round_().clamp_(0, last)
        yield scale, zero


def in_tiles(
    quantise: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, height: int = 1
) -> tuple[Tensor, ...]:
    """On a CPU a few rows at a time, whole blocks of `height`."""
    if x.device.type != "cpu":
        return quantise(x)
    step = max(1, TILE // max(1, x.shape[1] * height)) * height
    tiles = [quantise(rows) for rows in x.split(step)]
    return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))


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


def in_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """`[blocks, rows, blocks, columns]`; those at the ends are filled up with zeros."""
    height, width = x.shape
    missing = (0, -width % columns, 0, -height % rows)
    padded = F.pad(x, missing) if any(missing) else x
    blocks: Tensor = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks


def over_blocks(scale: Tensor, rows: int, columns: int, x: Tensor) -> Tensor:
    """The scale of each number of `x`."""
    wide = spread(scale, columns, x.shape[1])
    return wide.repeat_interleave(rows, dim=0)[: len(x)] if rows > 1 else wide
