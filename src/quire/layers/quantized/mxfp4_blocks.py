"""MXFP4 as a CPU multiplies it: a checkpoint's codes and scales, in the order of GGUF's blocks.

    checkpoint   codes 0 1 │ 2 3 │ 4 5 │ …    two a byte, and the scales of all blocks apart
    a block      scale │ 0 16 │ 1 17 │ …      sixteen rows interleaved (`kernels/gguf_blocks.py`)

Those are as many bytes, and the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.kernels.dequantise import unpack_nibbles
from quire.kernels.gguf_blocks import LANES, TYPES
from quire.layers.matrix import Matrix
from quire.layers.quantized.blocks import in_blocks, refuse_ragged
from quire.layers.quantized.fp4 import MXFP4_GROUP, checked_exponents
from quire.layers.quantized.gguf import GGUFMatrix
from quire.layers.weights import Weight

WORD = 4  # bytes of codes that a row has side by side


@dataclass(frozen=True)
class Mxfp4Blocks:
    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return Mxfp4BlocksMatrix(TYPES["MXFP4"], out_features, in_features)

    def joins(self, sizes: Sequence[int]) -> bool:
        """Others than the last have to end with sixteen rows, which are interleaved."""
        return all(size % LANES == 0 for size in sizes[:-1])


class Mxfp4BlocksMatrix(GGUFMatrix):
    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        refuse_ragged(whole, MXFP4_GROUP)
        held = range(self.out_features)[rows]
        scales = self.weight[..., :LANES].unflatten(-1, (1, LANES, 1))
        codes = self.weight[..., LANES:].unflatten(-1, (-1, LANES, WORD))
        check = partial(checked_exponents, name=f"{whole.name}.weight_scale")
        stored = in_blocks(whole, 1, MXFP4_GROUP)  # which refuses a part of a block
        stored = stored.placed(InBlocks(scales, held, check), ".weight_scale")
        yield stored.stored_as(torch.uint8, torch.float8_e8m0fnu)
        stored = in_blocks(whole, 1, 2).placed(InBlocks(codes, held, halves), ".weight")
        yield stored.stored_as(torch.uint8)


def halves(packed: Tensor) -> Tensor:
    """Neighbours in a byte to GGUF's order: one of the first sixteen beside one of the others."""
    codes: Tensor = unpack_nibbles(packed).unflatten(-1, (-1, 2, MXFP4_GROUP // 2))
    return codes[..., 0, :] | (codes[..., 1, :] << 4)


@dataclass(frozen=True)
class InBlocks:
    """A place for rows of what each block has: `memory` is `[groups, blocks, words, 16, bytes]`.

    `arranged` makes bytes of a checkpoint's numbers, all of a row one behind the other.
    """

    memory: Tensor
    held: range
    arranged: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        return len(self.held) * self.memory[0, :, :, 0].numel()

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def rows(self, start: int, stop: int) -> InBlocks:
        return replace(self, held=self.held[start:stop])

    def store(self, numbers: Tensor) -> None:
        groups, lanes = self._places()
        _, blocks, words, _, size = self.memory.shape
        rows = self.arranged(numbers).reshape(len(numbers), blocks, words, size)
        self.memory[groups, :, :, lanes] = rows

    def holds(self, numbers: Tensor) -> bool:
        groups, lanes = self._places()
        found = self.memory[groups, :, :, lanes]
        return torch.equal(found.flatten(), self.arranged(numbers).flatten())

    def _places(self) -> tuple[Tensor, Tensor]:
        rows = torch.arange(self.held.start, self.held.stop)
        return rows // LANES, rows % LANES
