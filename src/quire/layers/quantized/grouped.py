"""Four or eight bits a number, in groups along a row: AWQ, GPTQ and what is stored like them.

A code is unsigned. Its number is `(code - zero) * scale`, where the zero is the middle code or is
stored for each group. Four-bit codes lie two a byte, the lower half first. With `by_index` (GPTQ's
`desc_act`) the checkpoint says for each input which group it is of; else groups are runs of inputs.

On a GPU, once they are loaded, four-bit matrices are put in the order of `kernels/int4_tiles.py`;
those with an index, by groups first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.dequantise import from_codes, pack_nibbles, spread, unpack_nibbles
from quire.kernels.four_bits import GROUP, FourBitExperts, from_quarters, scale_words
from quire.kernels.int4_tiles import (
    Int4Tiles,
    by_tiles,
    has_tiles,
    rows_by_tiles,
    rows_of_tiles,
    to_tiles,
)
from quire.kernels.quantise import to_groups
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import in_blocks, refuse_ragged
from quire.layers.quantized.matrix import QuantizedFormat, QuantizedMatrix
from quire.layers.quantized.places import IndexPlace, QuantizingPlace, ScalePlace
from quire.layers.quantized.quarters import replace_codes
from quire.layers.weights import Fused, TensorPlace, Weight, parameter, ranges, span

MADE_GROUP = 128  # inputs, where no checkpoint says how many
HALVES = (torch.float16, torch.bfloat16)  # that tensor cores multiply


@dataclass(frozen=True)
class Grouped(QuantizedFormat):
    """`group`: the inputs that share a scale; None: a whole row."""

    bits: int = 4
    group: int | None = None
    has_zeros: bool = False
    by_index: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return GroupedMatrix(out_features, in_features, self)

    def making(self) -> Grouped:
        return replace(self, makes=True, by_index=False)

    def joins(self, sizes: Sequence[int]) -> bool:
        """Each matrix has an index of its own."""
        return not self.by_index


class GroupedMatrix(QuantizedMatrix):
    """`weight` has the codes, `weight_scale` and `weight_zero` one element for each group."""

    def __init__(self, out_features: int, in_features: int, kind: Grouped) -> None:
        super().__init__(out_features, in_features)
        self.kind = kind
        self.codes_per_byte = 8 // kind.bits
        group = max(1, in_features) if kind.group is None else kind.group
        # Made ones have no shorter group at the end.
        self.group = math.gcd(group, in_features) if kind.makes else group
        groups = -(-in_features // self.group)
        row_bytes = -(-in_features // self.codes_per_byte)
        self.weight = parameter(out_features, row_bytes, dtype=torch.uint8)
        self.weight_scale = parameter(out_features, groups, dtype=kind.scale_dtype)
        zeros = parameter(out_features, groups, dtype=torch.uint8)
        self.weight_zero = zeros if kind.has_zeros else None
        index = parameter(in_features, dtype=torch.int32)
        self.group_index = index if kind.by_index else None
        self.multiplies_codes = kind.bits == 4 and not kind.by_index
        self._tiles: Int4Tiles | None = None
        self._order: Tensor | None = None  # of inputs, by groups
        self._experts: FourBitExperts | None = None  # if it has been laid out as those of several

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._tiles is None or x.dtype not in HALVES:
            return super().multiply(x, bias)
        from quire.kernels.triton.int4.product import int4_linear

        return int4_linear(self._by_groups(x), self._tiles, bias)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        if self._tiles is None or x.dtype not in HALVES:
            return super().gated(x, bias, backend, activation)
        from quire.kernels.triton.int4.product import int4_linear

        return int4_linear(self._by_groups(x), self._tiles, bias, activation)

    def _by_groups(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)

    def lay_out(self) -> None:
        if self.weight.is_cuda:
            self.lay_in_tiles()
        elif self.multiplies_codes:
            self.lay_in_blocks(self.weight, self.weight_scale, self.weight_zero)

    def lay_in_tiles(self) -> None:
        """Change the order in memory to that of a GPU's kernels, where they can multiply it."""
        fits = has_tiles(self.out_features, self.in_features, self.group)
        if self.kind.bits != 4 or not fits or self._tiles is not None:
            return
        if self.group_index is not None and not self._lay_by_groups(self.group_index):
            return
        self.weight.copy_(to_tiles(self.weight))
        self.weight_scale.copy_(by_tiles(self.weight_scale))
        if self.weight_zero is not None:
            self.weight_zero.copy_(by_tiles(self.weight_zero))
        words = self.weight.view(torch.int16)
        self._tiles = Int4Tiles(words, self.weight_scale, self.weight_zero, self.group)

    def lay_out_experts(self, experts: Sequence[Matrix]) -> bool:
        is_known = self.kind.bits == 4 and self.weight_scale.dtype in HALVES
        fits = self.group % GROUP == 0 and self.group_index is None
        if not (self.weight.is_cuda and is_known and fits):
            return False
        self.lay_in_quarters(experts)
        return True

    def lay_in_quarters(self, experts: Sequence[Matrix]) -> None:
        """Put it in the order of grouped products (`kernels/four_bits.py`)."""
        words, zeros = self._words(self.weight_scale, len(experts)), None
        if self.weight_zero is not None:
            zeros = self._words(self.weight_zero.to(torch.int16), len(experts))
        replace_codes(self, experts, is_whole=True)
        codes = self.weight.view(torch.int16)
        by_expert = codes.view(len(experts), -1, codes.shape[1])
        laid_out = FourBitExperts(by_expert, words, self.weight_scale.dtype, zeros)
        for part in (self, *experts):
            assert isinstance(part, GroupedMatrix)
            part._experts = laid_out

    def _words(self, of_groups: Tensor, experts: int) -> Tensor:
        by_expert = of_groups.view(experts, -1, of_groups.shape[1])
        return scale_words(by_expert, self.group, self.in_features)

    def as_experts(self, count: int) -> FourBitExperts | None:
        return self._experts

    def _codes(self, rows: slice | Tensor) -> Tensor:
        """As they were loaded."""
        if self._experts is None:
            return self.codes_of(self.weight, rows)
        codes = self.weight[rows].view(torch.int16)
        return from_quarters(codes, self.in_features, is_whole=True)

    def _lay_by_groups(self, index: Tensor) -> bool:
        """Change the order of inputs to that of their groups, unless these differ in size."""
        order = index.argsort(stable=True)
        if not torch.equal(index[order], torch.arange(len(index)).to(index) // self.group):
            return False
        self.weight.copy_(pack_nibbles(unpack_nibbles(self.weight)[:, order]))
        self._order = order
        return True

    @property
    def format_name(self) -> str:
        zeros = " with zeros" if self.kind.has_zeros else ""
        return f"{self.kind.bits} bits in groups of {self.group}{zeros}"

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        if self._tiles is not None:
            return self._rows_of_tiles(rows)
        codes = self._codes(rows)
        if self.kind.bits == 4:
            codes = unpack_nibbles(codes)
        zeros = None if self.weight_zero is None else self._by_input(self.weight_zero[rows])
        scales = self._by_input(self.weight_scale[rows])
        return from_codes(codes, scales, zeros, middle=1 << (self.kind.bits - 1))

    def rows_in(self, dtype: torch.dtype, rows: slice) -> Tensor:
        if self._tiles is not None or not self.weight.is_cuda:
            return super().rows_in(dtype, rows)
        from quire.kernels.triton.dequantise import dequantise

        zeros = None if self.weight_zero is None else self.weight_zero[rows]
        codes, scales, bits = self._codes(rows), self.weight_scale[rows], self.kind.bits
        index = self.group_index
        return dequantise(
            codes, scales, zeros, index, self.in_features, self.group, bits, False, dtype
        )

    def _rows_of_tiles(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self.weight.device)
        zeros = None
        if self.weight_zero is not None:
            zeros = spread(rows_by_tiles(self.weight_zero, rows), self.group, self.in_features)
        scales = spread(rows_by_tiles(self.weight_scale, rows), self.group, self.in_features)
        found = from_codes(rows_of_tiles(self.weight, rows), scales, zeros, middle=8)
        return found if self._order is None else found[:, self._order.argsort()]

    def _by_input(self, of_groups: Tensor) -> Tensor:
        if self.group_index is None:
            return spread(of_groups, self.group, self.in_features)
        return of_groups.index_select(1, self.group_index)

    def stored_rows(self, name: str, rows: range) -> slice:
        return slice(None) if name == "group_index" else span(rows)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        if self.in_features % self.codes_per_byte:
            raise self._in_no_whole_bytes(whole)
        codes, scales = self.weight[rows], self.weight_scale[rows]
        if self.kind.makes:
            kept = [codes, scales]
            if self.weight_zero is not None:
                kept.append(self.weight_zero[rows])
            place = QuantizingPlace(tuple(kept), (1,) * len(kept), self._quantise())
            yield whole.placed(place, ".weight")
            return
        stored = in_blocks(whole, 1, self.codes_per_byte).placed(TensorPlace(codes), ".weight")
        yield stored.stored_as(torch.uint8)
        of_groups = self._of_groups(whole)
        name = f"{whole.name}.weight_scale"
        yield of_groups.placed(ScalePlace(scales, name), ".weight_scale")
        if self.weight_zero is not None:
            zeros = of_groups.placed(TensorPlace(self.weight_zero[rows]), ".weight_zero")
            yield zeros.stored_as(torch.uint8)
        if self.group_index is not None:
            yield self._index(whole, self.group_index)

    def _in_no_whole_bytes(self, whole: Weight) -> ModelError:
        """No ranks can share what is odd from the start."""
        inputs = whole.shape[1]
        is_cut = inputs % self.codes_per_byte == 0
        part = f"a part of {self.in_features:,}" if is_cut else f"{inputs:,}"
        other = "tensor_parallel_size" if is_cut else "quantization"
        return ModelError(
            f"{whole.name} has {part} inputs, which {self.kind.bits} bits a number do not store in "
            f"whole bytes: choose another {other} or model."
        )

    def _of_groups(self, whole: Weight) -> Weight:
        width = whole.shape[1]
        group = width if self.kind.group is None else self.group
        refuse_ragged(whole, group)
        if self.kind.by_index and width != self.in_features:
            raise ModelError(
                f"{whole.name} has its {width:,} inputs in groups out of order (desc_act), so "
                f"ranks cannot share them: use tensor_parallel_size=1, or weights without."
            )
        return in_blocks(whole, 1, group)

    def _index(self, whole: Weight, index: Tensor) -> Weight:
        fused = whole.fused and Fused(whole.fused.name, 0, self.in_features)
        columns = span(ranges(whole.shape, whole.part)[1])
        place = IndexPlace(index, f"{whole.name}.g_idx", self.weight_scale.shape[1])
        alone = replace(whole, shape=whole.shape[1:], part=(columns,), fused=fused, order=())
        return alone.placed(place, ".g_idx").stored_as(torch.int32, torch.int64)

    def _quantise(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return partial(
            to_groups,
            bits=self.kind.bits,
            group=self.group,
            has_zeros=self.kind.has_zeros,
            scale_dtype=self.kind.scale_dtype,
        )
