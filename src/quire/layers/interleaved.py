"""Matrices whose rows take turns in one tensor of a checkpoint.

    stored    gate 0 ─ up 0 ─ gate 1 ─ up 1 ─ …
    in memory gate 0 ─ gate 1 ─ … │ up 0 ─ up 1 ─ …

They are put in order while they are loaded, and each row is read once: the tensor is one weight,
whose place deals its rows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.weights import Place, Weight, ranges


@dataclass(frozen=True)
class InterleavedPlace:
    """Takes rows of which the first belongs to the first place, the next to the second, …."""

    places: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places)

    @property
    def dtype(self) -> torch.dtype:
        return self.places[0].dtype

    def rows(self, start: int, stop: int) -> InterleavedPlace:
        """Row `start` may be that of any place, which then becomes the first."""
        count = len(self.places)
        turned = []
        for row in range(start, start + count):
            index = row % count
            turned.append(self.places[index].rows(row // count, -((index - stop) // count)))
        return InterleavedPlace(tuple(turned))

    def store(self, numbers: Tensor) -> None:
        for i, place in enumerate(self.places):
            place.store(numbers[i :: len(self.places)])

    def holds(self, numbers: Tensor) -> bool:
        count = len(self.places)
        return all(place.holds(numbers[i::count]) for i, place in enumerate(self.places))


def interleaved(name: str, weights: Sequence[Weight]) -> Weight:
    """The tensor `name`, whose rows are those of weights of one shape in turn."""
    first, count = weights[0], len(weights)
    rows = ranges(first.shape, first.part)[0]
    return replace(
        first,
        name=name,
        shape=(count * first.shape[0], *first.shape[1:]),
        place=InterleavedPlace(tuple(weight.place for weight in weights)),
        part=(slice(count * rows.start, count * rows.stop), *first.part[1:]),
        fused=None,
    )
