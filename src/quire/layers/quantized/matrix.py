"""What quantised matrices share: their types in memory, and the product that dequantises first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.codes import Codes
from quire.layers.matrix import Matrix
from quire.layers.quantized.code_blocks import CodeBlocks, lay_in_blocks

Format = TypeVar("Format", bound="QuantizedFormat")

# Numbers dequantised at once: a product takes little memory beside the matrix as it is stored.
TILE_ON_CPU, TILE_ON_GPU = 1 << 22, 1 << 26


@dataclass(frozen=True)
class QuantizedFormat:
    """`makes`: the checkpoint has the numbers themselves, which are quantised as they arrive."""

    makes: bool = False

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        raise NotImplementedError

    def making(self: Format) -> Format:
        """The same in memory, from a checkpoint that has the numbers themselves."""
        return replace(self, makes=True)

    def joins(self, sizes: Sequence[int]) -> bool:
        """Whether matrices of so many rows can be one, one below the other."""
        return True


class QuantizedMatrix(Matrix):
    """A matrix whose parameters have the types that its format stores."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self._blocks: CodeBlocks | None = None  # on a CPU, where it has kernels for the format

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        return declared

    def lay_in_blocks(self, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Change the order in memory to that of a CPU's kernels, where they can multiply it."""
        if self._blocks is None:
            self._blocks = lay_in_blocks(
                weight, scales, zeros, self.in_features, self.activation_bits
            )

    def codes_of(self, weight: Tensor, rows: slice | Tensor) -> Tensor:
        """Some rows of `weight` as the format has them, whatever their order in memory is."""
        if self._blocks is None:
            return weight[rows]
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop)
        return self._blocks.codes(rows).view(weight.dtype)

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        """Some rows as numbers, in float32; `rows` are a slice with both ends, or indices."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The whole matrix as numbers: what every product is held to."""
        return self.dense_rows(slice(0, self.out_features))

    def rows_in(self, dtype: torch.dtype, rows: slice) -> Tensor:
        """Some rows as they are multiplied; a format may have a faster way on a GPU."""
        return self.dense_rows(rows).to(dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """By a CPU's kernel, if it has one for the format."""
        if self._blocks is not None:
            return self._blocks.product(x, bias)
        return self.multiply_dense(x, bias)

    def multiply_dense(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The reference: a few rows are dequantised, multiplied and forgotten at a time."""
        tile = TILE_ON_GPU if x.is_cuda else TILE_ON_CPU
        step = max(1, tile // max(1, self.in_features))
        out = x.new_empty(len(x), self.out_features)
        for start in range(0, self.out_features, step):
            rows = slice(start, min(start + step, self.out_features))
            added = None if bias is None else bias[rows]
            out[:, rows] = F.linear(x, self.rows_in(x.dtype, rows), added)
        return out

    def multiply_codes(self, x: Codes, bias: Tensor | None) -> Tensor:
        """The reference, too: both are dequantised."""
        return self.multiply_dense(x.dense().to(x.dtype), bias)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        product = None if self._blocks is None else self._blocks.product
        if product is not None and product.gates and activation is Activation.SILU:
            return product(x, bias, gated=True)
        return backend.act_and_mul(self.multiply(x, bias), activation)

    def rows(self, indices: Tensor) -> Tensor:
        return self.dense_rows(indices)
