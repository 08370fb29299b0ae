"""Four-bit floating point (E2M1), two a byte: MXFP4 and NVFP4.

mxfp4    number = E2M1 * 2 ** (byte - 127)        the byte is that of 32 inputs
nvfp4    number = E2M1 * scale * over_all         an e4m3 of 16 inputs, a float32 of the row
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.kernels.dequantise import E8M0_NAN, from_e8m0, from_fp4, spread, unpack_nibbles
from quire.kernels.four_bits import GROUP, FourBitExperts, exponent_words, from_quarters
from quire.kernels.fp8 import FP8
from quire.kernels.quantise import to_mxfp4, to_nvfp4
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import in_blocks, refuse_ragged
from quire.layers.quantized.matrix import QuantizedFormat, QuantizedMatrix
from quire.layers.quantized.places import QuantizingPlace, ScalePlace
from quire.layers.quantized.quarters import replace_codes
from quire.layers.weights import BadNumbers, TensorPlace, Weight, parameter

MXFP4_GROUP, NVFP4_GROUP = 32, 16


@dataclass(frozen=True)
class Mxfp4(QuantizedFormat):
    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return Mxfp4Matrix(out_features, in_features, self.makes)


@dataclass(frozen=True)
class Nvfp4(QuantizedFormat):
    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return Nvfp4Matrix(out_features, in_features, self.makes)


class Fp4Matrix(QuantizedMatrix):
    """The codes; a subclass has the scales."""

    def __init__(self, out_features: int, in_features: int, makes: bool, group: int) -> None:
        super().__init__(out_features, in_features)
        self.makes = makes
        self.group = math.gcd(group, in_features) if makes else group
        self.groups = -(-in_features // self.group)
        self.weight = parameter(out_features, -(-in_features // 2), dtype=torch.uint8)

    def scales(self, rows: slice | Tensor) -> Tensor:
        """The scale of each group, in float32."""
        raise NotImplementedError

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        scales = spread(self.scales(rows), self.group, self.in_features)
        return from_fp4(unpack_nibbles(self.codes(rows)), scales)

    def codes(self, rows: slice | Tensor) -> Tensor:
        """Two a byte, neighbours in each."""
        return self.weight[rows]

    def rows_in(self, dtype: torch.dtype, rows: slice) -> Tensor:
        if not self.weight.is_cuda:
            return super().rows_in(dtype, rows)
        from quire.kernels.triton.dequantise import dequantise

        codes, scales = self.codes(rows), self.scales(rows)
        return dequantise(codes, scales, None, None, self.in_features, self.group, 4, True, dtype)

    def _codes(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        refuse_ragged(whole, self.group)
        stored = in_blocks(whole, 1, 2).placed(TensorPlace(self.weight[rows]), ".weight")
        yield stored.stored_as(torch.uint8)


class Mxfp4Matrix(Fp4Matrix):
    def __init__(self, out_features: int, in_features: int, makes: bool) -> None:
        super().__init__(out_features, in_features, makes, MXFP4_GROUP)
        self.weight_scale = parameter(out_features, self.groups, dtype=torch.uint8)
        self._exponents: Tensor | None = None  # of experts that were laid out

    @property
    def format_name(self) -> str:
        return "MXFP4"

    def scales(self, rows: slice | Tensor) -> Tensor:
        return from_e8m0(self.weight_scale[rows])

    def codes(self, rows: slice | Tensor) -> Tensor:
        found = super().codes(rows)
        if self._exponents is None:
            return found
        return from_quarters(found.view(torch.int16), self.in_features, is_whole=False)

    def lay_out_experts(self, experts: Sequence[Matrix]) -> bool:
        if not self.weight.is_cuda or self.group != GROUP:
            return False
        self.lay_in_quarters(experts)
        return True

    def lay_in_quarters(self, experts: Sequence[Matrix]) -> None:
        """Put it in the order of grouped products (`kernels/four_bits.py`)."""
        by_expert = self.weight_scale.view(len(experts), -1, self.groups)
        exponents = exponent_words(by_expert, self.in_features)
        replace_codes(self, experts, is_whole=False)
        for part in (self, *experts):
            assert isinstance(part, Mxfp4Matrix)
            part._exponents = exponents

    def as_experts(self, count: int) -> FourBitExperts | None:
        if self._exponents is None:
            return None
        codes = self.weight.view(torch.int16)
        return FourBitExperts(codes.view(count, -1, codes.shape[1]), self._exponents)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        scales = self.weight_scale[rows]
        if self.makes:
            kept, quantise = (self.weight[rows], scales), partial(to_mxfp4, group=self.group)
            yield whole.placed(QuantizingPlace(kept, (1, 1), quantise), ".weight")
            return
        yield from self._codes(whole, rows)
        place = ExponentPlace(scales, f"{whole.name}.weight_scale")
        stored = in_blocks(whole, 1, self.group).placed(place, ".weight_scale")
        yield stored.stored_as(torch.uint8, torch.float8_e8m0fnu)


class Nvfp4Matrix(Fp4Matrix):
    def __init__(self, out_features: int, in_features: int, makes: bool) -> None:
        super().__init__(out_features, in_features, makes, NVFP4_GROUP)
        self.weight_scale = parameter(out_features, self.groups, dtype=FP8)
        self.weight_scale_over_all = parameter(out_features, 1, dtype=torch.float32)

    @property
    def format_name(self) -> str:
        return "NVFP4"

    def scales(self, rows: slice | Tensor) -> Tensor:
        return self.weight_scale[rows].float() * self.weight_scale_over_all[rows]

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        scales, over_all = self.weight_scale[rows], self.weight_scale_over_all[rows]
        if self.makes:
            kept = (self.weight[rows], scales, over_all)
            quantise = partial(to_nvfp4, group=self.group)
            yield whole.placed(QuantizingPlace(kept, (1, 1, 1), quantise), ".weight")
            return
        yield from self._codes(whole, rows)
        name = f"{whole.name}.weight_scale"
        stored = in_blocks(whole, 1, self.group).placed(ScalePlace(scales, name), ".weight_scale")
        yield stored.stored_as(FP8)
        ending = ".weight_scale_over_all"
        place = ScalePlace(over_all, f"{whole.name}{ending}")
        yield in_blocks(whole, 1, whole.shape[1]).placed(place, ending)


class ExponentPlace(ScalePlace):
    """Takes powers of two as bytes, of which the last stands for no number."""

    def store(self, numbers: Tensor) -> None:
        self.tensor.copy_(checked_exponents(numbers, self.name))

    def holds(self, numbers: Tensor) -> bool:
        return torch.equal(self.tensor, numbers.view(torch.uint8).to(self.tensor.device))


def checked_exponents(numbers: Tensor, name: str) -> Tensor:
    """The bytes of the tensor `name`, all of which have to stand for numbers."""
    exponents = numbers.view(torch.uint8)
    if bool((exponents == E8M0_NAN).any()):
        raise BadNumbers(name, "has scales that are no finite numbers")
    return exponents
