"""Codes of four or eight bits as a CPU multiplies them: in the order of GGUF's blocks.

The codes of sixteen rows are interleaved in their own place (`kernels/gguf_blocks.py`); those of
four bits are put in the order of Q4_0 before, in which the first and the second half of 32 codes
share bytes. Scales are read from a copy in float32, and with zero points there are minima beside
them:

    number = scale * (code - zero) = scale * code + minimum
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.dequantise import pack_nibbles, unpack_nibbles
from quire.kernels.gguf_blocks import CODES, LANES, BlockType, interleave, rows_of
from quire.kernels.gguf_product import Product, product_with_codes

HALF = 16  # codes: of 32, those that are in low nibbles


@dataclass(frozen=True)
class CodeBlocks:
    kind: BlockType
    memory: Tensor  # [groups of rows, blocks, bytes]
    product: Product

    def codes(self, rows: Tensor) -> Tensor:
        """Those of some rows as they were before, in bytes."""
        numbers = rows.cpu().numpy().astype("int64", copy=False)
        found = torch.from_numpy(rows_of(self.kind, self.memory.numpy(), numbers))
        return found if self.kind.name == "INT8" else _neighbours(found)


def lay_in_blocks(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, columns: int, activation_bits: int
) -> CodeBlocks | None:
    """Change the order of `weight`, in its place, to that of a CPU's kernels; None: they cannot
    multiply it, and it stays as it is.

    `weight` `[rows, bytes]` is uint8 with two codes a byte, or int8; `scales` and `zeros` have one
    element for each group of each row.
    """
    rows, groups = scales.shape
    four_bits = "INT4" if zeros is None else "INT4_ZEROS"
    kind = CODES["INT8" if weight.dtype == torch.int8 else four_bits]
    blocks = columns // kind.values
    if rows % LANES or columns % kind.values or blocks % groups:
        return None
    apart = [scales.float()] if zeros is None else [scales.float(), -scales.float() * zeros.float()]
    interleaved = torch.stack(apart, -1).unflatten(0, (-1, LANES)).permute(0, 2, 3, 1).contiguous()
    memory = weight.view(torch.uint8).view(rows // LANES, blocks, LANES * kind.bytes)
    product = product_with_codes(kind, memory, rows, interleaved, activation_bits)
    if product is None:
        return None
    stored = weight.view(torch.uint8).clone() if kind.name == "INT8" else _halves(weight)
    interleave(kind, stored.numpy(), memory.numpy(), 0)
    return CodeBlocks(kind, memory, product)


def _halves(packed: Tensor) -> Tensor:
    """From neighbours in a byte to one of the first half beside one of the second."""
    codes: Tensor = unpack_nibbles(packed).unflatten(-1, (-1, 2, HALF))
    return (codes[..., 0, :] | (codes[..., 1, :] << 4)).flatten(1)


def _neighbours(halves: Tensor) -> Tensor:
    both = halves.unflatten(-1, (-1, HALF))
    return pack_nibbles(torch.cat((both & 15, both >> 4), dim=-1).flatten(1))
