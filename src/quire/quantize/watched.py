"""Matrices that keep their numbers, and note what they are multiplied with.

A model is opened with them as if they were a format of its checkpoint, so every family has them,
and experts have one for each expert. Rounding asks one thing of the inputs `x` of a matrix: the sum
of `x xᵀ` over tokens, `[inputs, inputs]`: half the Hessian of the squared error of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.formats import Dense, MatrixFormat
from quire.layers.matrix import Matrix
from quire.layers.quantized.matrix import QuantizedFormat, QuantizedMatrix
from quire.layers.weights import TensorPlace, Weight, parameter
from quire.models.quantization.names import is_embedding, is_head

KEYS = ("k_proj", "kv_a_proj_with_mqa")  # what layers that make K, or a latent for it, are called


@dataclass(frozen=True)
class Watched(QuantizedFormat):
    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return WatchedMatrix(out_features, in_features)


@dataclass(frozen=True)
class WatchedFormats:
    """Of all matrices that `--quantization` would quantise."""

    def of(self, *names: str) -> MatrixFormat:
        return Dense() if is_embedding(names) or is_head(names) else Watched(makes=True)


@dataclass
class Notes:
    """Of a matrix and of its parts, which are told apart by their rows."""

    weight: float = 0.0  # of what is multiplied now; 0: it is not noted
    rows_of: dict[str, range] = field(default_factory=dict)  # of layers, by the checkpoint's names
    parts: set[range] = field(default_factory=set)  # that are multiplied by themselves
    hessians: dict[range, Tensor] = field(default_factory=dict)

    def add(self, rows: range, x: Tensor) -> None:
        x = x.float()
        if rows not in self.hessians:
            self.hessians[rows] = x.new_zeros((x.shape[1], x.shape[1]))
        self.hessians[rows].addmm_(x.T, x, alpha=self.weight)

    def hessian(self, name: str) -> Tensor | None:
        """Of the rows among which the layer's are; None: no token came there."""
        start = self.rows_of[name].start
        return next((found for rows, found in self.hessians.items() if start in rows), None)


class WatchedMatrix(QuantizedMatrix):
    own_tokens = True

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features)
        self.weight = parameter(out_features, in_features)
        self.notes = Notes()
        self.held = range(out_features)  # the rows of the whole matrix

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        return dtype

    @property
    def format_name(self) -> str:
        return "numbers whose inputs are watched"

    @property
    def hessian_bytes(self) -> int:
        return max(1, len(self.notes.parts)) * self.in_features**2 * torch.float32.itemsize

    @property
    def makes_keys(self) -> bool:
        return any(name.endswith(KEYS) for name in self.notes.rows_of)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.notes.weight:
            self.notes.add(self.held, x)
        return F.linear(x, self.weight, bias)

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        return self.weight[rows].float()

    def part(self, rows: range) -> Matrix:
        part = super().part(rows)
        assert isinstance(part, WatchedMatrix)
        part.held = self.held[rows.start : rows.stop]
        self.notes.parts.add(part.held)
        return part

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        self.notes.rows_of[whole.name] = self.held[rows]
        if whole.fused is not None:
            self.notes.rows_of[whole.fused.name] = self.held
        yield whole.placed(TensorPlace(self.weight[rows]), ".weight")
