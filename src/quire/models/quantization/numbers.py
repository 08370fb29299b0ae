"""Layers that are numbers here, whatever a checkpoint has them as: routers, and gates of shared
experts. They are small and decide much; libraries quantise some of them with all the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.formats import MatrixFormat
from quire.layers.quantized.grouped import Grouped
from quire.layers.quantized.matrix import QuantizedFormat, QuantizedMatrix
from quire.layers.quantized.scaled import Scaled
from quire.layers.weights import BadNumbers, Weight
from quire.models.checkpoints.lazy_tensor import LazyTensor, Slices
from quire.models.checkpoints.misfits import name_in_file

GATES = re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router|shared_expert_gate)$")
OF_CODES = ("weight", "weight_scale", "weight_scale_over_all", "weight_zero", "g_idx")
PIECE = 1 << 24  # numbers read at once
CPU = torch.device("cpu")


class Dequantised:
    """The numbers of a layer, of which the checkpoint has codes and scales."""

    dtype = torch.float32

    def __init__(
        self, name: str, stored_as: QuantizedFormat, tensors: Mapping[str, LazyTensor]
    ) -> None:
        self._name, self._format, self._tensors = name, stored_as, tensors

    @property
    def shape(self) -> Sequence[int]:
        rows, width = self._tensors["weight"].shape
        if isinstance(self._format, Scaled):
            return (rows, width)
        bits = self._format.bits if isinstance(self._format, Grouped) else 4
        return (rows, width * 8 // bits)

    def __getitem__(self, part: Slices) -> Tensor:
        return self._numbers[part]

    @cached_property
    def _numbers(self) -> Tensor:
        matrix = self._format.matrix(*self.shape)
        assert isinstance(matrix, QuantizedMatrix)
        matrix.make_room(self.dtype, CPU)
        for weight in matrix.weights(Weight(self._name, tuple(self.shape)), slice(None)):
            ending = weight.name.removeprefix(f"{self._name}.")
            stored = self._tensors.get(ending)
            if stored is None or tuple(stored.shape) != weight.shape:
                found = "missing" if stored is None else f"{list(stored.shape[:4])}"
                raise ModelError(
                    f"{weight.name} is {found}, not {list(weight.shape)}: download the model again."
                )
            try:
                for piece in weight.pieces(PIECE):
                    piece.fill(stored[piece.part])
            except BadNumbers as error:
                raise BadNumbers(name_in_file(stored, error.name), error.problem) from None
        return matrix.dense()


def is_gate(name: str) -> bool:
    return GATES.search(name) is not None


def as_numbers(
    name: str, stored_as: MatrixFormat, tensors: dict[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """The tensors of a quantised layer, with numbers in place of codes and what belongs to them."""
    if not isinstance(stored_as, QuantizedFormat):
        return tensors
    rest = {end: tensor for end, tensor in tensors.items() if end not in OF_CODES}
    return {"weight": Dequantised(name, stored_as, tensors), **rest}
