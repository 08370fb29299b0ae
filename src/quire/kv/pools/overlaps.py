"""Whether views of an engine's tensors have a byte in common: exactly, and for many at once.

A view's bytes are at `start + Σ index × stride`. So two views meet where some difference of their
indices makes up for the difference of their starts:

    views alike, [2 blocks, 3 heads] with strides 8 and 2, one 3 behind the other
    3 = d × 8 + rest, the rest from -4 to 4          d is 0, and the rest 3
    3 = d × 2 + rest, the rest 0                     there is no such d: they are interleaved

With the largest stride first, few differences come into question for each dimension: two, if a
stride passes over all that smaller ones reach, as in every ordinary tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Numbers = npt.NDArray[np.int64]
Kind = tuple[tuple[int, int], ...]  # the dimensions of a view: stride in bytes, and size


class Steps(NamedTuple):
    """How far indices of two views can be apart, in one dimension or in those of one stride."""

    stride: int
    low: int
    high: int


def find_overlap(views: Sequence[Tensor]) -> tuple[int, int] | None:
    """Two views that have a byte in common, by their places in the list."""
    kinds = [_kind_of(view) for view in views]
    starts = np.array([view.data_ptr() for view in views], dtype=np.int64)
    for first, second in _that_may_meet(kinds, starts):
        steps = _steps_between(kinds[first[0]], kinds[second[0]])
        distances = starts[second] - starts[first]
        if _can_be_stepped(distances, steps):
            at = _first_that_can(distances, steps)
            return int(first[at]), int(second[at])
    return None


def _first_that_can(distances: Numbers, steps: Sequence[Steps]) -> int:
    """The place of the first distance that is a sum of steps, where one is."""
    low, high = 0, len(distances)
    while high - low > 1:
        middle = (low + high) // 2
        if _can_be_stepped(distances[low:middle], steps):
            high = middle
        else:
            low = middle
    return low


def _kind_of(view: Tensor) -> Kind:
    """Its dimensions, with one for the bytes of a value."""
    size = view.itemsize
    strides = [stride * size for stride in view.stride()]
    dims = [*zip(strides, view.shape, strict=True), (1, size)]
    return tuple((stride, count) for stride, count in dims if stride and count > 1)


def _that_may_meet(kinds: Sequence[Kind], starts: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs of views of which neither ends before the other begins, for each two kinds of views."""
    extents = [sum(stride * (count - 1) for stride, count in kind) for kind in kinds]
    lasts = starts + np.array(extents, dtype=np.int64)
    meet = (starts[:, None] <= lasts) & (starts <= lasts[:, None])
    first, second = np.nonzero(np.triu(meet, 1))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    number_of = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
    both = number_of[first] * len(numbers) + number_of[second]
    for each in np.unique(both):
        yield first[both == each], second[both == each]


def _steps_between(one: Kind, other: Kind) -> list[Steps]:
    """What an index of `one` less an index of `other` can be, the largest stride first."""
    low: dict[int, int] = defaultdict(int)
    high: dict[int, int] = defaultdict(int)
    for stride, count in one:
        high[stride] += count - 1
    for stride, count in other:
        low[stride] -= count - 1
    return [Steps(stride, low[stride], high[stride]) for stride in sorted({*low, *high})[::-1]]


def _can_be_stepped(distances: Numbers, steps: Sequence[Steps]) -> bool:
    """Whether some distance is a sum of steps, as many of each stride as there can be."""
    left = distances
    for at, (stride, low, high) in enumerate(steps):
        smaller = steps[at + 1 :]
        least = sum(step.stride * step.low for step in smaller)
        most = sum(step.stride * step.high for step in smaller)
        left = np.unique(left)  # interleaved layers have few distances, many times each
        first = np.maximum(low, -((most - left) // stride))
        last = np.minimum(high, (left - least) // stride)
        counts = np.maximum(0, last - first + 1)
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        left = np.repeat(left - first * stride, counts) - within * stride
    return bool((left == 0).any())
