"""What a model's weights will take in memory, format by format, known before any is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from quire.layers.experts import Experts
from quire.layers.formats import AllDense, StackedMatrix
from quire.layers.matrix import Matrix
from quire.layers.weights import Block, room_needed
from quire.models.config import ModelConfig
from quire.models.source import shapes

NO_MATRIX = "norms and biases"


@dataclass(frozen=True)
class Held:
    """Matrices of one format: how many, and their bytes with all their scales."""

    matrices: int = 0
    bytes: int = 0


def held_by_format(model: Block, dtype: torch.dtype) -> Mapping[str, Held]:
    """By the names of the formats, largest first. Dense ones are named after the model's type.

    A matrix that several layers share, such as a tied head, counts once.
    """
    found: dict[str, Held] = defaultdict(Held)
    for matrix in model.modules():
        if isinstance(matrix, Matrix) and not isinstance(matrix, StackedMatrix):
            name = matrix.format_name
            name = str(dtype).removeprefix("torch.") if name == "dense" else name
            so_far = found[name]
            size = so_far.bytes + room_needed(matrix, dtype)
            found[name] = Held(so_far.matrices + 1, size)
    rest = room_needed(model, dtype) - sum(each.bytes for each in found.values())
    found[NO_MATRIX] = Held(0, rest)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


@dataclass(frozen=True)
class ItemSizes:
    """Bytes of a weight, on average, with what its format adds to it."""

    experts: float
    others: float


def item_sizes(config: ModelConfig, dtype: torch.dtype) -> ItemSizes:
    stored, of_experts = _rooms(config, dtype)
    numbers, in_experts = (
        room / dtype.itemsize for room in _rooms(replace(config, formats=AllDense()), dtype)
    )
    others = (stored - of_experts) / (numbers - in_experts)
    return ItemSizes(of_experts / in_experts if in_experts else others, others)


def _rooms(config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """What all of a model takes, and what its experts do."""
    model = shapes(config)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return room_needed(model, dtype), sum(room_needed(each, dtype) for each in experts)
