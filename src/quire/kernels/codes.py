"""Codes of eight bits and their scales, on both sides of a product: weights, and activations.

A matrix of codes is multiplied fastest by codes. Activations have them computed for each token:
its largest number, or that of each group of its columns, has the largest code. Whatever writes the
activations (a norm, a gate) writes the codes instead, if the matrix that reads them takes some:

    norm ── Codes ── qkv      gate and up ── act_and_mul ── Codes ── down
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.dequantise import spread
from quire.kernels.fp8 import FP8, LARGEST
from quire.kernels.quantise import INT8_LARGEST, TINY

_TILE = 128  # rows of a product's larger tiles; small ones have half as many


class BlockScales(NamedTuple):
    """A matrix's scales: one for each block of so many rows and columns."""

    values: Tensor  # float32 [blocks down, blocks across]
    rows: int
    columns: int

    @property
    def is_by_rows(self) -> bool:
        """Whether all columns of a row share a scale."""
        return self.values.shape[1] == 1


@dataclass(frozen=True)
class CodeFormat:
    """Of activations: e4m3 or int8; `group`: the columns that share a scale; None: all of a
    token's."""

    group: int | None = None
    dtype: torch.dtype = FP8

    @property
    def largest(self) -> float:
        return LARGEST if self.dtype == FP8 else INT8_LARGEST

    def groups(self, columns: int) -> int:
        return 1 if self.group is None else columns // self.group


@dataclass(frozen=True, eq=False)
class Codes:
    """Activations `[tokens, columns]` as codes and scales."""

    values: Tensor  # e4m3 or int8 [tokens, columns]
    scales: Tensor  # float32 [tokens, groups]; those of a group lie side by side
    dtype: torch.dtype  # of the numbers that these stand for
    spare: int = 0  # rows behind both in memory, which hold anything

    def __len__(self) -> int:
        return len(self.values)

    def filled_up(self, multiple: int) -> Codes:
        """With spare rows up to a multiple of so many, as far as there are some."""
        rows = min(-(-len(self) // multiple) * multiple, len(self) + self.spare)
        if rows == len(self):
            return self
        values, scales = (
            each.as_strided((rows, each.shape[1]), each.stride())
            for each in (self.values, self.scales)
        )
        return Codes(values, scales, self.dtype, len(self) + self.spare - rows)

    def dense(self) -> Tensor:
        """The numbers: what every product of codes is held to. In float32."""
        columns = self.values.shape[1]
        return self.values.float() * spread(self.scales, columns // self.scales.shape[1], columns)


Activations = Tensor | Codes


def with_spare(rows: int) -> int:
    """For how many rows whatever writes codes makes room, so that products have full tiles."""
    return -(-rows // _TILE) * _TILE


def quantise(x: Tensor, form: CodeFormat) -> Codes:
    """The plain way: whatever writes codes instead of `x` writes these.

    The largest number of a group becomes the largest code. Weights try a few scales, once; here
    that would be a pass over the numbers for each.
    """
    groups = x.float().unflatten(1, (form.groups(x.shape[1]), -1))
    scales = groups.abs().amax(2) / form.largest
    values = groups / scales.clamp(min=TINY).unsqueeze(2)
    if form.dtype == torch.int8:
        values.round_()
    values.clamp_(-form.largest, form.largest)
    return Codes(values.flatten(1).to(form.dtype), scales.t().contiguous().t(), x.dtype)
