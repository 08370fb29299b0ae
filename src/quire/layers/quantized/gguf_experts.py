"""Experts of GGUF files on a GPU: in the formats of four bits that grouped products have.

    file     scale │ 0 16 │ 1 17 │ 2 18 │ …    a block of 32 inputs, whose codes are two a byte
    memory   0 1 │ 2 3 │ 4 5 │ …               neighbours; the scales of all blocks lie apart

Those are as many bytes, and the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.dequantise import pack_nibbles
from quire.kernels.gguf_blocks import TYPES, BlockType, scales_are_finite
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import stored_columns
from quire.layers.quantized.fp4 import Mxfp4Matrix
from quire.layers.quantized.grouped import Grouped, GroupedMatrix
from quire.layers.weights import BadNumbers, Weight

MATRICES = ("gate", "up", "down")  # of an expert


@dataclass(frozen=True)
class GGUFExpertsFormat:
    type: str

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return EXPERT_TYPES[self.type](out_features, in_features)


class Mxfp4GGUFMatrix(Mxfp4Matrix):
    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features, makes=False)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        yield _placed(whole, "MXFP4", self.weight[rows], self.weight_scale[rows])


class Q4GGUFMatrix(GroupedMatrix):
    """Q4_0: the middle code is 0."""

    def __init__(self, out_features: int, in_features: int) -> None:
        kind = Grouped(bits=4, group=TYPES["Q4_0"].values, scale_dtype=torch.float16)
        super().__init__(out_features, in_features, kind)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        yield _placed(whole, "Q4_0", self.weight[rows], self.weight_scale[rows])


EXPERT_TYPES: Mapping[str, Callable[[int, int], Matrix]] = {
    "MXFP4": Mxfp4GGUFMatrix,
    "Q4_0": Q4GGUFMatrix,
}


def keeps_experts_on_gpu(types: Mapping[str, str]) -> bool:
    """Whether grouped products multiply the experts of a layer as they are: by the types of all its
    matrices, since one of numbers beside one of codes has no kernel."""
    return (
        all(types.get(name) in EXPERT_TYPES for name in MATRICES) and types["gate"] == types["up"]
    )


def _placed(whole: Weight, type_: str, codes: Tensor, scales: Tensor) -> Weight:
    kind = TYPES[type_]
    place = BlocksPlace(codes, scales, whole.name, kind)
    return stored_columns(whole, kind).placed(place, ".weight")


@dataclass(frozen=True)
class BlocksPlace:
    """A place for rows of a file's blocks, whose codes and scales go apart."""

    codes: Tensor
    scales: Tensor
    name: str
    kind: BlockType

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def rows(self, start: int, stop: int) -> BlocksPlace:
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop])

    def store(self, numbers: Tensor) -> None:
        if not scales_are_finite(self.kind, numbers.numpy()):
            raise BadNumbers(self.name, "has scales that are no finite numbers")
        codes, scales = self._apart(numbers)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def holds(self, numbers: Tensor) -> bool:
        codes, scales = self._apart(numbers)
        return torch.equal(self.codes.cpu(), codes) and torch.equal(self.scales.cpu(), scales)

    def _apart(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        blocks = numbers.unflatten(1, (-1, self.kind.bytes))
        of_scale = self.scales.element_size()
        scales = blocks[..., :of_scale].flatten(1).view(self.scales.dtype)
        codes = blocks[..., of_scale:]
        return pack_nibbles(torch.cat((codes & 15, codes >> 4), -1)).flatten(1), scales
