"""Experts whose weights have four bits, in the order in which a GPU's grouped products read them.

Codes are two a byte. A byte of a checkpoint has those of two neighbours; here it has those of a
column and of the one half a row away, so that what is unpacked of a tile of bytes are two tiles of
neighbouring columns:

    byte j of a row     column j | column j + columns / 2 << 4

The scales of 64 bytes are a word. Of MXFP4 it has four exponents, each that of 32 columns: two of
the lower codes, two of the upper ones. Of whole numbers it has two scales of 16 bits, each that of
64 columns or more. The words of all rows of an expert lie side by side, for each 64 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.dequantise import pack_nibbles, unpack_nibbles

GROUP = 32  # columns that share an exponent
STEP = 2 * GROUP  # bytes whose exponents are a word


class FourBitExperts(NamedTuple):
    """One matrix of each expert: E2M1 codes with exponents, or whole numbers with scales."""

    codes: Tensor  # uint8 [experts, outputs, inputs / 2]
    words: Tensor  # int32 [experts, steps, outputs]: four exponents each, of which 127 is 1
    scale_dtype: torch.dtype | None = None  # where words are two scales: their type
    zeros: Tensor | None = None  # as those words: two codes that stand for 0; None: it is 8


def is_divided(columns: int) -> bool:
    """Whether both halves of a row consist of whole groups."""
    return columns % (2 * GROUP) == 0


def halves_apart(packed: Tensor) -> Tensor:
    """From neighbours in a byte, `[rows, columns / 2]`."""
    low, high = unpack_nibbles(packed).chunk(2, dim=1)
    return low | high << 4


def halves_together(packed: Tensor) -> Tensor:
    """The inverse of `halves_apart`."""
    return pack_nibbles(torch.cat((packed & 15, packed >> 4), dim=1))


def exponent_words(exponents: Tensor) -> Tensor:
    """`[experts, rows, groups]` to `[experts, steps, rows]`; a last step may be half one."""
    halves = exponents.unflatten(2, (2, -1))  # of lower codes, of upper ones
    halves = F.pad(halves, (0, halves.shape[3] % 2)).unflatten(3, (-1, 2))
    by_step = halves.permute(0, 3, 1, 2, 4).contiguous()  # expert, step, row, half, group
    words: Tensor = by_step.flatten(3).view(torch.int32).squeeze(3)
    return words


def has_words(columns: int, group: int) -> bool:
    """Whether each half of a row consists of whole steps, whose columns share a scale."""
    return columns % (2 * STEP) == 0 and group % STEP == 0


def scale_words(of_groups: Tensor, group: int, columns: int) -> Tensor:
    """Numbers of 16 bits for each group, `[experts, rows, groups]`, to `[experts, steps, rows]`."""
    first = torch.arange(0, columns, STEP, device=of_groups.device)  # column of each half word
    halves = of_groups[:, :, first // group].unflatten(2, (2, -1))
    by_step = halves.permute(0, 3, 1, 2).contiguous()  # expert, step, row, half
    words: Tensor = by_step.view(torch.int32).squeeze(3)
    return words
