"""Matrices of GGUF's types on a GPU: loaded as the file has them, then put in tiles in the same
memory, one matrix after the other (`kernels/gguf_tiles.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.gguf_blocks import TYPES, BlockType, scales_are_finite
from quire.kernels.gguf_tiles import ROWS, TILE_TYPES, GGUFTiles, numbers_of_tiles, to_tiles
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import stored_columns
from quire.layers.weights import BadNumbers, TensorPlace, Weight, parameter

HALVES = (torch.float16, torch.bfloat16)  # that tensor cores multiply


@dataclass(frozen=True)
class GGUFTilesFormat:
    """One of GGUF's types, in tiles."""

    type: str

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return GGUFTilesMatrix(TYPES[self.type], out_features, in_features)

    def joins(self, sizes: Sequence[int]) -> bool:
        """Others than the last have to end with a tile, lest a product has rows of nothing."""
        return all(size % ROWS == 0 for size in sizes[:-1])


class GGUFTilesMatrix(Matrix):
    fills_columns = True

    def __init__(self, kind: BlockType, out_features: int, in_features: int) -> None:
        super().__init__()
        self.kind = kind
        self.out_features, self.in_features = out_features, in_features
        self._computed_in = torch.bfloat16
        self._tiles: GGUFTiles | None = None  # once it is laid out
        blocks = -(-in_features // kind.values)
        self._stored = out_features, blocks * kind.bytes
        size = TILE_TYPES[kind.name].num_bytes(out_features, blocks * kind.values)
        self.weight = parameter(size, dtype=torch.uint8)

    @property
    def format_name(self) -> str:
        return self.kind.name

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        return declared

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        super().make_room(dtype, device)
        self._computed_in = dtype

    def lay_out(self) -> None:
        if self._tiles is None and self.weight.device.type != "meta":
            self._tiles = to_tiles(self.kind.name, self._rows.clone(), self.weight)

    @property
    def _rows(self) -> Tensor:
        """Those of the file, before they are laid out."""
        rows, size = self._stored
        return self.weight[: rows * size].view(rows, size)

    @property
    def tiles(self) -> GGUFTiles:
        assert self._tiles is not None
        return self._tiles

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype not in HALVES:
            return F.linear(x, self.dense().to(x.dtype), bias)
        from quire.kernels.triton.gguf.product import gguf_linear

        return gguf_linear(x, self.tiles, bias)

    def multiply_into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if x.dtype not in HALVES:
            super().multiply_into(x, bias, out)
            return
        from quire.kernels.triton.gguf.product import gguf_linear

        gguf_linear(x, self.tiles, bias, out)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        return backend.act_and_mul(self.multiply(x, bias), activation)

    def rows(self, indices: Tensor) -> Tensor:
        from quire.kernels.triton.gguf.rows import dequantise

        return dequantise(self.tiles, self._computed_in, indices)

    def dense(self) -> Tensor:
        """`[out_features, in_features]`, dequantised: what every product is held to."""
        return numbers_of_tiles(self.tiles)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        raw = stored_columns(whole, self.kind)
        yield raw.placed(CheckedRows(self._rows[rows], whole.name, self.kind), ".weight")


@dataclass(frozen=True)
class CheckedRows(TensorPlace):
    """A place for the file's rows, whose scales have to be numbers."""

    name: str
    kind: BlockType

    def rows(self, start: int, stop: int) -> CheckedRows:
        return replace(self, tensor=self.tensor[start:stop])

    def store(self, numbers: Tensor) -> None:
        if not scales_are_finite(self.kind, numbers.numpy()):
            raise BadNumbers(self.name, "has scales that are no finite numbers")
        super().store(numbers)
