"""Which matrices of a checkpoint can be had in four bits, and how many inputs share a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable

from quire.errors import ModelError
from quire.layers.experts import Experts
from quire.layers.quantized.grouped import MADE_GROUP
from quire.models.causal_lm import CausalLM
from quire.quantize.watched import WatchedMatrix

ENDING = ".weight"
FEWEST_IN_GROUP = 32  # with fewer, scales would take more than an eighth of the codes' bits


class Plan:
    """It asks for the shapes of a model alone: what has to be refused is, before weights are read.

    What stays as it was has no say in the size of groups: rows that have none, and experts that the
    checkpoint has in one tensor.
    """

    def __init__(self, model: CausalLM, tensors: Iterable[str]) -> None:
        self.others: set[str] = set()  # tensors that are not of the language model
        self._names: dict[str, str] = {}  # that the folder has, by what the model calls them
        for name in tensors:
            known = model.text_tensor(name)
            if known is None:
                self.others.add(name)
            else:
                self._names[known] = name
        self.matrices = [each for each in model.modules() if isinstance(each, WatchedMatrix)]
        self._largest_group = _largest_group(model, list(filter(self._named, self.matrices)))
        if not any(self.layers(matrix) for matrix in self.matrices):
            raise ModelError(
                f"No matrix of the model can be had in four bits: their rows are no multiple of "
                f"{FEWEST_IN_GROUP}, or all experts of a layer lie in one tensor."
            )

    def layers(self, matrix: WatchedMatrix) -> dict[str, str]:
        """What the checkpoint has of a matrix that can be rounded: its tensors, by layers."""
        return self._named(matrix) if self.group(matrix) >= FEWEST_IN_GROUP else {}

    def group(self, matrix: WatchedMatrix) -> int:
        """How many inputs share a scale."""
        return math.gcd(self._largest_group, matrix.in_features)

    def _named(self, matrix: WatchedMatrix) -> dict[str, str]:
        names = ((layer, self._names.get(layer + ENDING)) for layer in matrix.notes.rows_of)
        return {layer: name for layer, name in names if name is not None}


def _largest_group(model: CausalLM, named: list[WatchedMatrix]) -> int:
    """transformers has one size of groups for all matrices of a mixture of experts."""
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    if not experts:
        return MADE_GROUP
    of_experts = {id(matrix) for each in experts for matrix in (each.gate_up, each.down)}
    narrow = {matrix.in_features for matrix in named if matrix.in_features % FEWEST_IN_GROUP}
    refused = [matrix.in_features for matrix in named if id(matrix) in of_experts]
    for size in sorted(narrow.intersection(refused)):
        raise ModelError(
            f"All matrices of a mixture of experts have groups of one size, and rows of {size} "
            f"numbers have none of {FEWEST_IN_GROUP} or more: serve it with quantization=int4 "
            f"instead, which has groups of any size."
        )
    return math.gcd(MADE_GROUP, *({matrix.in_features for matrix in named} - narrow))
