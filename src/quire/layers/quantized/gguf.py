"""Matrices as GGUF files have them: blocks of codes with their scales, or numbers of 16 bits,
sixteen rows interleaved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quire.hardware import is_made_for_bfloat16
from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.gguf_blocks import (
    HALVES,
    LANES,
    TYPES,
    BlockType,
    interleave,
    rows_of,
    scales_are_finite,
)
from quire.kernels.gguf_product import (
    Product,
    dequantised,
    kernel_name,
    kernels,
    product_with,
)
from quire.layers.formats import Dense, MatrixFormat
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import stored_columns
from quire.layers.quantized.gguf_experts import GGUFExpertsFormat
from quire.layers.quantized.gguf_tiles import GGUFTilesFormat
from quire.layers.weights import BadNumbers, Weight, parameter

EXPERTS = ".experts."  # in the names of their layers


@dataclass(frozen=True)
class GGUFFormat:
    """One of GGUF's types, kept as it is."""

    type: str

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return GGUFMatrix(TYPES[self.type], out_features, in_features)

    def joins(self, sizes: Sequence[int]) -> bool:
        """Others than the last have to end with sixteen rows, which are interleaved."""
        return all(size % LANES == 0 for size in sizes[:-1])


@dataclass(frozen=True)
class GGUFFormats:
    """The types of a file's matrices, by the names of their layers; those it does not name, and
    those of types that are not multiplied as they are, are dense. `on_gpu`: for a GPU's kernels."""

    types: tuple[tuple[str, str], ...]
    on_gpu: bool = False

    @classmethod
    def from_types(cls, types: Mapping[str, str], on_gpu: bool = False) -> GGUFFormats:
        return cls(tuple(sorted(types.items())), on_gpu)

    @property
    def only_halves(self) -> bool:
        """Whether nothing that is multiplied is rounded."""
        return all(type_ in HALVES for _, type_ in self.types)

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return dict(self.types)

    def of(self, *names: str) -> MatrixFormat:
        for name in names:
            if name in self._by_name:
                return self._format(name, self._by_name[name])
        return Dense()

    def _format(self, name: str, type_: str) -> MatrixFormat:
        if not self.on_gpu:
            return GGUFFormat(type_)
        return GGUFExpertsFormat() if EXPERTS in name else GGUFTilesFormat(type_)


def keeps_codes_on_gpu(name: str, shape: Sequence[int]) -> bool:
    """Whether a GPU multiplies a matrix of codes as it is: not latents, which are laid out anew,
    nor experts, but for those of one type (`gguf_experts.py`)."""
    return len(shape) == 2 and EXPERTS not in name and not name.endswith(".kv_b_proj")


def keeps_halves(name: str, shape: Sequence[int], beside_codes: bool = False) -> bool:
    """Whether a matrix of 16 bits stays so where a CPU computes in float32, as it does for codes:
    not experts, whose few tokens have a kernel for float32, nor latents, which are laid out anew.
    """
    return (
        (beside_codes or not is_made_for_bfloat16())
        and len(shape) == 2
        and shape[-1] % TYPES["F16"].values == 0
        and EXPERTS not in name
        and not name.endswith(".kv_b_proj")
    )


class GGUFMatrix(Matrix):
    def __init__(self, kind: BlockType, out_features: int, in_features: int) -> None:
        super().__init__()
        self.kind, self.multiplies_codes = kind, kind.has_codes
        self.out_features, self.in_features = out_features, in_features
        self._computed_in = torch.float32
        self._product: Product | None = None
        groups, blocks = -(-out_features // LANES), -(-in_features // kind.values)
        self.weight = parameter(groups, blocks, LANES * kind.bytes, dtype=torch.uint8)

    @property
    def format_name(self) -> str:
        return self.kind.name

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        return declared

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        super().make_room(dtype, device)
        self._computed_in, self._product = dtype, None
        if device.type == "cpu":
            kernels.prepare(kernel_name(self.kind, self.activation_bits))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiplier()(x, bias)

    def multiply_into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        multiplier = self._multiplier()
        if multiplier.is_whole and x.dtype == torch.float32:
            multiplier(x, bias, into=out)
        else:
            super().multiply_into(x, bias, out)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        multiplier = self._multiplier()
        if activation is Activation.SILU and multiplier.gates:
            return multiplier(x, bias, gated=True)
        return backend.act_and_mul(multiplier(x, bias), activation)

    def _multiplier(self) -> Product:
        """Found by the first product, when the kernel must be there."""
        if self._product is None:
            self._product = product_with(
                self.kind, self.weight, self.out_features, self.activation_bits
            )
        return self._product

    def rows(self, indices: Tensor) -> Tensor:
        return dequantised(self.kind, self.weight, indices).to(self._computed_in)

    def dense(self) -> Tensor:
        """`[out_features, in_features]`, dequantised."""
        return self.rows(torch.arange(self.out_features))

    def stored_rows(self, name: str, rows: range) -> slice:
        return slice(rows.start // LANES, -(-rows.stop // LANES))

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        raw = stored_columns(whole, self.kind)
        held = range(self.out_features)[rows]
        yield raw.placed(InterleavedRows(whole.name, self.kind, self.weight, held), ".weight")


@dataclass(frozen=True)
class InterleavedRows:
    """A place for the file's rows, among those of a matrix."""

    name: str
    kind: BlockType
    memory: Tensor
    held: range

    @property
    def nbytes(self) -> int:
        return len(self.held) * self.memory.shape[1] * self.kind.bytes

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def rows(self, start: int, stop: int) -> InterleavedRows:
        return replace(self, held=self.held[start:stop])

    def store(self, numbers: Tensor) -> None:
        if not scales_are_finite(self.kind, numbers.numpy()):
            raise BadNumbers(self.name, "has scales that are no finite numbers")
        interleave(self.kind, numbers.numpy(), self.memory.numpy(), self.held.start)

    def holds(self, numbers: Tensor) -> bool:
        found = rows_of(self.kind, self.memory.numpy(), torch.tensor(self.held).numpy())
        return torch.equal(torch.from_numpy(found), numbers)
