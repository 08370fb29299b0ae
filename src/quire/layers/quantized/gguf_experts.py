"""MXFP4 experts of GGUF files on a GPU, which has grouped products for those of checkpoints.

    file     scale │ 0 16 │ 1 17 │ 2 18 │ …    a block of 32 inputs, whose codes are two a byte
    memory   0 1 │ 2 3 │ 4 5 │ …               neighbours; the scales of all blocks lie apart

Other types are dequantised. Q4_0 would be four bits in groups of 32, too, but with scales in
float16, which grouped products in bfloat16 are slow to multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.dequantise import pack_nibbles
from quire.kernels.gguf_blocks import TYPES, scales_are_finite
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import stored_columns
from quire.layers.quantized.fp4 import Mxfp4Matrix
from quire.layers.weights import BadNumbers, Weight

KEPT = "MXFP4"


@dataclass(frozen=True)
class GGUFExpertsFormat:
    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return GGUFExpertsMatrix(out_features, in_features)


class GGUFExpertsMatrix(Mxfp4Matrix):
    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features, makes=False)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        place = BlocksPlace(self.weight[rows], self.weight_scale[rows], whole.name)
        yield stored_columns(whole, TYPES[KEPT]).placed(place, ".weight")


@dataclass(frozen=True)
class BlocksPlace:
    """A place for rows of a file's blocks, whose codes and scales go apart."""

    codes: Tensor
    scales: Tensor
    name: str

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def rows(self, start: int, stop: int) -> BlocksPlace:
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop])

    def store(self, numbers: Tensor) -> None:
        if not scales_are_finite(TYPES[KEPT], numbers.numpy()):
            raise BadNumbers(self.name, "has scales that are no finite numbers")
        codes, scales = _apart(numbers)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def holds(self, numbers: Tensor) -> bool:
        codes, scales = _apart(numbers)
        return torch.equal(self.codes.cpu(), codes) and torch.equal(self.scales.cpu(), scales)


def _apart(rows: Tensor) -> tuple[Tensor, Tensor]:
    blocks = rows.unflatten(1, (-1, TYPES[KEPT].bytes))
    codes = blocks[..., 1:]
    return pack_nibbles(torch.cat((codes & 15, codes >> 4), -1)).flatten(1), blocks[..., 0]
