"""Experts whose weights have four bits, in the order in which a GPU's grouped products read them.

Columns are cut into four quarters, each filled up to a multiple of 32. Four codes are 16 bits, one
of each quarter, so that what is unpacked of a tile of such are four tiles of neighbouring columns:

    element j of a row    columns j, j + quarter, j + 2 quarters, j + 3 quarters

A whole number has four bits side by side, the first quarter's the lowest. The bits of an E2M1 code
lie where, shifted together, they are those of bfloat16: sign, two of exponent, one of fraction. The
last quarter's lie where a multiplication by 2 ** 11 + 2 ** 5 + 1 moves each to its place.

    bit        15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    quarter     0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
    is          s  e  f  s  s  e  s  e  e  f  e  e  f  e  e  f

The scales of 32 elements are a word: four exponents. Of whole numbers they are two words of two
scales each. The words of all rows of an expert lie side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.dequantise import pack_nibbles, unpack_nibbles

GROUP = 32  # elements whose scales are together
# Of each quarter, where the sign of an E2M1 code lies, its exponent's two bits, its fraction.
E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (11, 10, 14, 13))
WHOLE_BITS = ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12))


class FourBitExperts(NamedTuple):
    """One matrix of each expert: E2M1 codes with exponents, or whole numbers with scales."""

    codes: Tensor  # int16 [experts, outputs, quarter]
    words: Tensor  # int32 [experts, steps, outputs]: four exponents each, of which 127 is 1
    scale_dtype: torch.dtype | None = None  # where there are two words a step: of their scales
    zeros: Tensor | None = None  # as those words: codes that stand for 0; None: it is 8


def quarter_of(columns: int) -> int:
    return -(-columns // (4 * GROUP)) * GROUP


def to_quarters(packed: Tensor, is_whole: bool) -> Tensor:
    """From neighbours in a byte, `[rows, columns / 2]`."""
    codes = unpack_nibbles(packed)
    codes = F.pad(codes, (0, 4 * quarter_of(codes.shape[1]) - codes.shape[1]))
    found = codes.new_zeros(len(codes), codes.shape[1] // 4, dtype=torch.int32)
    bits = WHOLE_BITS if is_whole else E2M1_BITS
    for quarter, places in zip(codes.chunk(4, dim=1), bits, strict=True):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            found |= ((quarter >> bit) & 1).int() << place
    return found.to(torch.int16)


def from_quarters(found: Tensor, columns: int, is_whole: bool) -> Tensor:
    """The inverse of `to_quarters`."""
    quarters = []
    for places in WHOLE_BITS if is_whole else E2M1_BITS:
        code = torch.zeros_like(found)
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            code |= ((found >> place) & 1) << bit
        quarters.append(code.to(torch.uint8))
    return pack_nibbles(torch.cat(quarters, dim=1)[:, :columns])


def exponent_words(exponents: Tensor, columns: int) -> Tensor:
    """Bytes for 32 columns each, `[experts, rows, groups]`, to `[experts, steps, rows]`."""
    by_step = _by_quarter(exponents, GROUP, columns).permute(0, 3, 1, 2)
    words: Tensor = by_step.flatten().view(torch.int32).view(by_step.shape[:3])
    return words


def scale_words(of_groups: Tensor, group: int, columns: int) -> Tensor:
    """Numbers of 16 bits for each group of columns to `[experts, 2 * steps, rows]`."""
    by_quarter = _by_quarter(of_groups, group, columns).unflatten(2, (2, 2))
    by_step = by_quarter.permute(0, 4, 2, 1, 3)  # expert, step, word, row, half
    words: Tensor = by_step.flatten().view(torch.int32)
    return words.view(len(of_groups), -1, of_groups.shape[1])


def _by_quarter(of_groups: Tensor, group: int, columns: int) -> Tensor:
    """`[experts, rows, 4, steps]`: of the first column of 32; beyond the last, that of the last."""
    first = torch.arange(0, 4 * quarter_of(columns), GROUP, device=of_groups.device)
    of_group = (first // group).clamp(max=of_groups.shape[2] - 1)
    found: Tensor = of_groups[:, :, of_group].unflatten(2, (4, -1))
    return found
