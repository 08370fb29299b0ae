"""Places of quantised matrices: scales that are checked, and numbers quantised as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quire.layers.weights import BadNumbers, FinitePlace


@dataclass(frozen=True)
class ScalePlace(FinitePlace):
    """Takes scales, of a type that may be as small as a byte."""

    what: ClassVar[str] = "scales"

    def holds(self, numbers: Tensor) -> bool:
        return torch.equal(self.tensor.float(), numbers.to(self.tensor).float())


@dataclass(frozen=True)
class IndexPlace:
    """Takes the group of each input, of which there are `groups`."""

    tensor: Tensor
    name: str
    groups: int

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> IndexPlace:
        return replace(self, tensor=self.tensor[start:stop])

    def store(self, numbers: Tensor) -> None:
        if bool((numbers < 0).any()) or bool((numbers >= self.groups).any()):
            raise BadNumbers(self.name, f"names groups beyond the {self.groups:,} that there are")
        self.tensor.copy_(numbers)

    def holds(self, numbers: Tensor) -> bool:
        return torch.equal(self.tensor, numbers.to(self.tensor))


@dataclass(frozen=True)
class QuantizingPlace:
    """Takes the numbers themselves, some rows at a time, and keeps their codes and scales.

    Of what it keeps each tensor has one row for `heights` rows of numbers.
    """

    kept: tuple[Tensor, ...]
    heights: tuple[int, ...]
    quantise: Callable[[Tensor], tuple[Tensor, ...]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, start: int, stop: int) -> QuantizingPlace:
        parts = [
            tensor[start // height : -(-stop // height)]
            for tensor, height in zip(self.kept, self.heights, strict=True)
        ]
        return replace(self, kept=tuple(parts))

    def store(self, numbers: Tensor) -> None:
        device = self.kept[0].device
        made = self.quantise(numbers.to(device, torch.float32))
        for tensor, found in zip(self.kept, made, strict=True):
            tensor.copy_(found)

    def holds(self, numbers: Tensor) -> bool:
        made = self.quantise(numbers.to(self.kept[0].device, torch.float32))
        pairs = zip(self.kept, made, strict=True)
        return all(torch.equal(tensor.float(), found.to(tensor).float()) for tensor, found in pairs)
