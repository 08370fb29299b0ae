"""The types of GGUF that are multiplied as they are stored, and the order they have in memory.

A row of a matrix is a run of blocks: scales, and codes of a few bits that they scale. In memory
sixteen rows are interleaved, unit by unit, so that one load has the same codes of all sixteen:

    file     row 0 [ scale │ codes 0-3 │ codes 4-7 │ … ]   row 1 [ scale │ codes 0-3 │ … ]   …
    memory   [ scales of rows 0 … 15 │ codes 0-3 of rows 0 … 15 │ codes 4-7 of rows 0 … 15 │ … ]

Those are the same bytes, and as many: what begins `p` bytes into a block begins `16 * p` bytes into
sixteen of them. But some types' bits are moved within a block first (`gguf_bits.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kernels.gguf_bits import MOVES, Bytes, move

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

    @property
    def coarse_name(self) -> str:
        """What it is called, if it has codes, beside activations of eight bits."""
        return f"{self.name}_beside_8_bits"


TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 32, ((2, 1), (4, 4))),
        BlockType("Q4_1", 32, ((2, 2), (4, 4))),
        BlockType("Q5_0", 32, ((2, 1), (4, 5))),
        BlockType("Q5_1", 32, ((2, 2), (4, 5))),
        BlockType("MXFP4", 32, ((1, 1), (4, 4))),
        BlockType("IQ4_NL", 32, ((2, 1), (4, 4))),
        BlockType("Q8_0", 32, ((2, 1), (4, 8))),
        BlockType("IQ4_XS", 256, ((2, 1), (1, 6), (4, 32))),
        BlockType("Q2_K", 256, ((1, 16), (4, 16), (2, 2))),
        BlockType("Q3_K", 256, ((4, 24), (1, 12), (2, 1))),
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
    blocks = rows.reshape(len(rows), -1, kind.bytes)
    moves = MOVES.get(kind.name)
    start = 0
    while start < len(rows):
        group, lane = divmod(first + start, LANES)
        whole = (len(rows) - start) // LANES if lane == 0 else 0
        count = whole * LANES if whole else min(LANES - lane, len(rows) - start)
        source = blocks[start : start + count]
        target = memory[group : group + max(whole, 1)]
        if moves and not whole:
            source = source.copy()
            move(moves.to_memory, source.reshape(-1, kind.bytes), 1)
        source = source.reshape(len(target), -1, *blocks.shape[1:])
        for ours, theirs in _units(kind, source, target):
            theirs[..., lane : lane + source.shape[1]] = np.moveaxis(ours, 1, -1)
        if moves and whole:
            move(moves.to_memory, target.reshape(-1, LANES * kind.bytes), LANES)
        start += count


def rows_of(kind: BlockType, memory: Bytes, rows: NDArray[np.int64]) -> Bytes:
    """Some rows as the file has them: `[rows, blocks * bytes]`."""
    groups, lanes = np.divmod(rows, LANES)
    found = np.empty((len(rows), 1, memory.shape[1], kind.bytes), np.uint8)
    for ours, theirs in _units(kind, found, memory):
        ours[:, 0] = theirs[groups, :, :, lanes]
    if kind.name in MOVES:
        move(MOVES[kind.name].to_file, found.reshape(-1, kind.bytes), 1)
    return found.reshape(len(rows), memory.shape[1] * kind.bytes)


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
