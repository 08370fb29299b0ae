"""Experts whose weights are MXFP4, in the order in which a GPU's grouped products read them.

Codes are two a byte. A byte of a checkpoint has those of two neighbours; here it has those of a
column and of the one half a row away, so that what is unpacked of a tile of bytes are two tiles of
neighbouring columns:

    byte j of a row     column j | column j + columns / 2 << 4

Four exponents, each that of 32 columns, are a word: those of the lower codes of 64 bytes, and those
of the upper ones. The words of all rows of an expert lie side by side, for each 64 bytes.
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
    """One matrix of each expert: E2M1 codes, and the powers of two that they are multiplied by."""

    codes: Tensor  # uint8 [experts, outputs, inputs / 2]
    exponents: Tensor  # int32 [experts, steps, outputs]: four each, of which 127 is 1


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
