"""The types of GGUF that are multiplied as they are stored, and the order they have in memory.

A row of a matrix is a run of blocks: scales, and codes of a few bits that they scale. In memory
sixteen rows are interleaved, unit by unit, so that one load has the same codes of all sixteen:

    file     row 0 [ scale │ codes 0-3 │ codes 4-7 │ … ]   row 1 [ scale │ codes 0-3 │ … ]   …
    memory   [ scales of rows 0 … 15 │ codes 0-3 of rows 0 … 15 │ codes 4-7 of rows 0 … 15 │ … ]

Those are the same bytes, and as many: what begins `p` bytes into a block begins `16 * p` bytes into
sixteen of them. But the bits of Q6_K's codes are moved within a block, to where fewer instructions
find them (`_to_threes`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LANES = 16  # rows that are interleaved

HALVES = ("F16", "BF16")  # numbers, not codes


@dataclass(frozen=True)
class BlockType:
    """One of GGUF's types: what a block holds, as units of so many bytes.

    Numbers of 16 bits need no blocks; theirs are as many as kernels multiply at a time.
    """

    name: str
    values: int
    units: tuple[tuple[int, int], ...]  # (bytes, count)

    @property
    def bytes(self) -> int:
        return sum(size * count for size, count in self.units)

    @property
    def has_codes(self) -> bool:
        """Whether it is quantised."""
        return self.name not in HALVES


TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 32, ((2, 1), (4, 4))),
        BlockType("Q4_1", 32, ((2, 2), (4, 4))),
        BlockType("Q5_0", 32, ((2, 1), (4, 5))),
        BlockType("Q5_1", 32, ((2, 2), (4, 5))),
        BlockType("MXFP4", 32, ((1, 1), (4, 4))),
        BlockType("Q8_0", 32, ((2, 1), (4, 8))),
        BlockType("Q4_K", 256, ((2, 2), (1, 12), (4, 32))),
        BlockType("Q5_K", 256, ((2, 2), (1, 12), (4, 40))),
        BlockType("Q6_K", 256, ((4, 48), (1, 16), (2, 1))),
        BlockType("F16", 8, ((2, 8),)),
        BlockType("BF16", 8, ((2, 8),)),
    )
}

# Codes alone, of matrices whose scales lie apart: four bits in the order of Q4_0, or eight.
CODES = {
    kind.name: kind
    for kind in (
        BlockType("INT4", 32, ((4, 4),)),
        BlockType("INT4_ZEROS", 32, ((4, 4),)),
        BlockType("INT8", 32, ((4, 8),)),
    )
}


def interleave(kind: BlockType, rows: Bytes, memory: Bytes, first: int) -> None:
    """Put `rows` `[rows, blocks * bytes]` into `memory` `[groups, blocks, 16 * bytes]`, from row
    `first` on."""
    if kind.name == "Q6_K":
        rows = _to_threes(rows, kind.bytes)
    blocks = rows.reshape(len(rows), -1, kind.bytes)
    start = 0
    while start < len(rows):
        group, lane = divmod(first + start, LANES)
        whole = (len(rows) - start) // LANES if lane == 0 else 0
        count = whole * LANES if whole else min(LANES - lane, len(rows) - start)
        source = blocks[start : start + count]
        source = source.reshape(max(whole, 1), -1, *blocks.shape[1:])
        for ours, theirs in _units(kind, source, memory[group : group + max(whole, 1)]):
            theirs[..., lane : lane + source.shape[1]] = np.moveaxis(ours, 1, -1)
        start += count


def rows_of(kind: BlockType, memory: Bytes, rows: NDArray[np.int64]) -> Bytes:
    """Some rows as the file has them: `[rows, blocks * bytes]`."""
    groups, lanes = np.divmod(rows, LANES)
    found = np.empty((len(rows), 1, memory.shape[1], kind.bytes), np.uint8)
    for ours, theirs in _units(kind, found, memory):
        ours[:, 0] = theirs[groups, :, :, lanes]
    stored = found.reshape(len(rows), memory.shape[1] * kind.bytes)
    return _from_threes(stored, kind.bytes) if kind.name == "Q6_K" else stored


def _to_threes(rows: Bytes, block_bytes: int) -> Bytes:
    """Four codes of six bits, of which files have four bits in one place and two in another, in
    three bytes of 32 each:

        first 32    code 0, bits 0-1 of code 3 above
        next 32     code 1, bits 2-3 of code 3
        last 32     code 2, bits 4-5 of code 3

    where code `i` is number `32 * i` or one of the 31 behind it, of half a block."""
    blocks = rows.reshape(-1, block_bytes)
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    even, odd = low[:, :, 0], low[:, :, 1]
    moved = blocks.copy()
    threes = moved[:, :192].reshape(-1, 2, 3, 32)
    threes[:, :, 0] = even & 0x0F | high << 4 & 0x30 | odd << 2 & 0xC0
    threes[:, :, 1] = odd & 0xCF | high << 2 & 0x30
    threes[:, :, 2] = even >> 4 | high & 0xF0
    return moved.reshape(rows.shape)


def _from_threes(rows: Bytes, block_bytes: int) -> Bytes:
    """The inverse of `_to_threes`."""
    blocks = rows.reshape(-1, block_bytes)
    threes = blocks[:, :192].reshape(-1, 2, 3, 32)
    first, second, third = (threes[:, :, i] for i in range(3))
    stored = blocks.copy()
    low, high = stored[:, :128].reshape(-1, 2, 2, 32), stored[:, 128:192].reshape(-1, 2, 32)
    low[:, :, 0] = first & 0x0F | third << 4
    low[:, :, 1] = second & 0xCF | first >> 2 & 0x30
    high[:] = first >> 4 & 0x03 | second >> 2 & 0x0C | third & 0xF0
    return stored.reshape(rows.shape)


def scales_are_finite(kind: BlockType, rows: Bytes) -> bool:
    """Whether no scale of `rows` `[rows, blocks * bytes]` is infinite or NaN."""
    if not kind.has_codes:
        return True
    blocks, at = rows.reshape(-1, kind.bytes), 0
    for size, count in kind.units:
        if size == 2:  # all of them are scales, in float16: an exponent of ones is no number
            exponents = blocks[:, at : at + size * count].view(np.uint16) & 0x7C00
            if (exponents == 0x7C00).any():
                return False
        at += size * count
    return kind.name != "MXFP4" or not (blocks[:, 0] == 0xFF).any()


def _units(kind: BlockType, blocks: Bytes, memory: Bytes) -> list[tuple[Bytes, Bytes]]:
    """The units of each size, in the file's order `[groups, lanes, blocks, units]` and in memory's
    `[groups, blocks, units, lanes]`, as views."""
    pairs, at = [], 0
    for size, count in kind.units:
        end = at + size * count
        number = np.dtype(f"u{size}")
        theirs = memory[..., LANES * at : LANES * end].view(number)
        theirs = theirs.reshape(*theirs.shape[:-1], count, LANES)
        pairs.append((blocks[..., at:end].view(number), theirs))
        at = end
    return pairs
