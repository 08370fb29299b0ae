"""A byte a number and a scale for each row, or each block of rows and columns: fp8 and int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.codes import BlockScales, CodeFormat, Codes
from quire.kernels.dequantise import spread
from quire.kernels.experts import CodedExperts
from quire.kernels.fp8 import FP8
from quire.kernels.quantise import to_fp8, to_int8
from quire.kernels.scaled_product import (
    is_as_is,
    multiply_as_is,
    multiply_codes,
    quantise,
    wanted_codes,
)
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import in_blocks
from quire.layers.quantized.matrix import QuantizedFormat, QuantizedMatrix
from quire.layers.quantized.places import QuantizingPlace, ScalePlace
from quire.layers.weights import FLOATS, TensorPlace, Weight, parameter

SCALES = (*FLOATS, torch.float8_e8m0fnu)  # what checkpoints have scales in


@dataclass(frozen=True)
class Scaled(QuantizedFormat):
    """`block`: the rows and columns that share a scale; None: each row has its own."""

    block: tuple[int, int] | None = None

    codes: ClassVar[torch.dtype]

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return ScaledMatrix(out_features, in_features, self)

    def joins(self, sizes: Sequence[int]) -> bool:
        """Blocks are counted from the first row, so each matrix has to end with one."""
        rows = 1 if self.block is None else self.block[0]
        return all(size % rows == 0 for size in sizes[:-1])

    def quantise(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8(Scaled):
    """e4m3: four bits of exponent and three of fraction, up to 448."""

    codes: ClassVar[torch.dtype] = FP8

    def quantise(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        return to_fp8(numbers, rows, columns)


@dataclass(frozen=True)
class Int8(Scaled):
    """`rounds_inputs`: whether the weights were made for activations in int8, which cost more than
    those in fp8 (`docs/models.md`)."""

    rounds_inputs: bool = False
    codes: ClassVar[torch.dtype] = torch.int8

    def quantise(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        return to_int8(numbers, rows, columns)


class ScaledMatrix(QuantizedMatrix):
    """`weight` has the codes, `weight_scale` a float32 for each row or block."""

    def __init__(self, out_features: int, in_features: int, kind: Scaled) -> None:
        super().__init__(out_features, in_features)
        self.kind = kind
        self.block_rows, self.block_columns = kind.block or (1, max(1, in_features))
        blocks = (-(-out_features // self.block_rows), -(-in_features // self.block_columns))
        self.multiplies_codes = kind.codes == torch.int8 and kind.block is None
        self.weight = parameter(out_features, in_features, dtype=kind.codes)
        self.weight_scale = parameter(*blocks, dtype=torch.float32)

    @property
    def format_name(self) -> str:
        codes = "fp8" if self.kind.codes == FP8 else "int8"
        if self.kind.block is None:
            return f"{codes} by row"
        return f"{codes} in blocks of {self.block_rows} × {self.block_columns}"

    @property
    def scales(self) -> BlockScales:
        return BlockScales(self.weight_scale, self.block_rows, self.block_columns)

    def lay_out(self) -> None:
        if self.multiplies_codes and self.weight.device.type == "cpu":
            self.lay_in_blocks(self.weight, self.weight_scale)

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        if isinstance(self.kind, Int8) and not self.kind.rounds_inputs:
            return None
        return wanted_codes(self.weight, self.scales, rows, dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = multiply_as_is(x, self.weight, self.scales, bias)
        if out is not None:
            return out
        form = self.takes(len(x), x.dtype)
        if form is None:
            return super().multiply(x, bias)
        return self.multiply_codes(quantise(x, form), bias)

    def add_product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        if self.adds_at_once(x, out):
            multiply_as_is(x, self.weight, self.scales, bias, add_to=out)
        else:
            super().add_product(x, out, bias)

    def adds_at_once(self, x: Tensor, out: Tensor) -> bool:
        return is_as_is(x, self.weight, self.scales) and out.is_contiguous()

    def multiply_codes(self, x: Codes, bias: Tensor | None) -> Tensor:
        if not x.values.is_cuda:
            return super().multiply_codes(x, bias)
        return multiply_codes(x, self.weight, self.scales, bias)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        out = multiply_as_is(x, self.weight, self.scales, bias, activation)
        return super().gated(x, bias, backend, activation) if out is None else out

    def as_experts(self, count: int) -> CodedExperts:
        return CodedExperts(self.weight.view(count, -1, self.in_features), self.scales)

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            numbers = torch.arange(rows.start, rows.stop, device=self.weight.device)
        else:
            numbers = rows
        scales = self.weight_scale[numbers // self.block_rows]
        codes = self.codes_of(self.weight, rows).float()
        return codes * spread(scales, self.block_columns, self.in_features)

    def stored_rows(self, name: str, rows: range) -> slice:
        height = self.block_rows if name == "weight_scale" else 1
        return slice(rows.start // height, -(-rows.stop // height))

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        held = range(self.out_features)[rows]
        blocks = slice(held.start // self.block_rows, -(-held.stop // self.block_rows))
        codes, scales = self.weight[rows], self.weight_scale[blocks]
        if self.kind.makes:
            place = QuantizingPlace((codes, scales), (1, self.block_rows), self._quantise())
            yield whole.placed(place, ".weight")
            return
        yield whole.placed(TensorPlace(codes), ".weight").stored_as(self.kind.codes)
        columns = whole.shape[1] if self.kind.block is None else self.block_columns
        name = f"{whole.name}.weight_scale"
        stored = in_blocks(whole, self.block_rows, columns)
        yield stored.placed(ScalePlace(scales, name), ".weight_scale").stored_as(*SCALES)

    def _quantise(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return partial(self.kind.quantise, rows=self.block_rows, columns=self.block_columns)
