"""GGUF's types in the order in which a GPU's tensor cores take them.

All types are of one form there. A number is `scale * (code - zero) + low`, or the entry of a table
instead of `code - zero`, with a scale (and a low) for each group of 16 or 32 columns:

    codes    their lower 2, 4 or 8 bits, and apart from these, of types with 3, 5 or 6 bits, the
             upper 1 or 2: no bit is idle
    scales   float16; or, of K types, small integers, times a float16 for each 256 columns

The codes of a tile, 16 rows by 128 columns, lie as fragments of tensor cores have them, 16 rows by
16 (`int4_tiles.py`), so that a thread finds all of its own in loads of 16 bytes (of 8, of single
bits):

    8 bits  [2 fragments][row g or g + 8][g][t]
    4 bits  [2 fragments][g][t][row g or g + 8]      then [columns from 0 or 8][2 columns][4 chunks]
    2, 1    [g][t][2 fragments][row g or g + 8]

In a chunk of 32 columns, those of the same thread of four follow one another, so that a thread
finds its numbers of x in one load, too: eight, or four of each fragment if that is a group.

    groups of 32  [4 t][2 fragments][columns from 0 or 8][2 columns]
    groups of 16  [2 fragments][4 t][columns from 0 or 8][2 columns]

Scales lie by 16 rows, each with its low: `[rows / 16][groups][g][row g or g + 8][scale, low]`. Rows
and columns that fill no tile are there, too, with scales of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gguf_blocks import TYPES
from quire.kernels.int4_tiles import by_tiles

ROWS, COLUMNS = 16, 128  # of a tile
WIDE = 256  # columns that share a float16 of a K type
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of halves

_AT_ONCE = 1 << 25  # codes, one a byte, of which there are several copies for a while

# Of a row's columns by chunk, the dimensions tile, chunk, fragment, k8, t, pair; and their sizes.
_CHUNKS = {32: (0, 1, 3, 4, 2, 5), 16: (0, 1, 2, 4, 3, 5)}
_SIZES = {32: (-1, 4, 4, 2, 2, 2), 16: (-1, 4, 2, 4, 2, 2)}
# Of the dimensions block, half, g and those.
_ORDER = {
    8: (0, 3, 5, 1, 2, 7, 6, 8, 4),
    4: (0, 3, 5, 2, 7, 1, 6, 8, 4),
    2: (0, 3, 2, 7, 5, 1, 6, 8, 4),
    1: (0, 3, 2, 7, 5, 1, 6, 8, 4),
}

# How scales are stored.
HALVES = 0  # float16 of a group
BYTES = 1  # a byte of a group, times a float16 of 256 columns
NIBBLES = 2  # the same of half a byte; the other half is the low
EXPONENTS = 3  # a power of two as its exponent, plus 127; twice that number


class Parts(NamedTuple):
    """Rows of a file taken apart: codes `[rows, columns]`, the others `[rows, groups]`."""

    codes: Tensor
    scale: Tensor
    low: Tensor | None = None
    wide_scale: Tensor | None = None
    wide_low: Tensor | None = None


@dataclass(frozen=True)
class TileType:
    """One of GGUF's types in tiles."""

    name: str
    parts: Callable[[Tensor], Parts]  # of blocks `[rows, blocks, bytes]`
    bits: int = 4  # of a code, the lower ones
    upper: int = 0  # of a code, those that lie apart
    zero: int = 0
    group: int = 32
    scales: int = HALVES
    has_lows: bool = False
    scale_zero: int = 0  # of bytes
    table: tuple[int, ...] = ()

    def num_bytes(self, rows: int, columns: int) -> int:
        """What a matrix takes; more than in a file, or as much."""
        has_pairs = self.has_lows and self.scales != NIBBLES
        of_group = (2 if self.scales == HALVES else 1) * (2 if has_pairs else 1)
        of_wide = 2 * (2 if self.has_lows else 1) if self.scales in (BYTES, NIBBLES) else 0
        groups = COLUMNS // self.group * of_group + COLUMNS * of_wide // WIDE
        of_tile = ROWS * (COLUMNS * (self.bits + self.upper) // 8 + groups)
        return -(-rows // ROWS) * -(-columns // COLUMNS) * of_tile


class GGUFTiles(NamedTuple):
    """A matrix, `rows` by `columns`. What its type does not have are the codes again."""

    kind: TileType
    rows: int
    columns: int
    codes: Tensor  # uint8 [rows / 16, bytes]
    upper: Tensor  # likewise
    scale: Tensor  # uint8 or float16 [rows / 16, groups * 16, or twice that]
    wide: Tensor  # float16, likewise

    @property
    def tiles(self) -> int:
        """In a row of them."""
        return self.codes.shape[1] * 8 // (self.kind.bits * ROWS * COLUMNS)


def to_tiles(type_: str, stored: Tensor, memory: Tensor | None = None) -> GGUFTiles:
    """From rows as a file has them, `[rows, bytes]`; into this memory, of `num_bytes`."""
    kind, block = TILE_TYPES[type_], TYPES[type_]
    columns = stored.shape[1] // block.bytes * block.values
    if memory is None:
        size = kind.num_bytes(len(stored), columns)
        memory = torch.empty(size, dtype=torch.uint8, device=stored.device)
    step = max(1, _AT_ONCE // (columns * ROWS)) * ROWS
    places: list[Tensor] = []
    for first, rows in enumerate(stored.split(step)):
        parts = _to_tiles(kind, rows.unflatten(1, (-1, block.bytes)))
        places = places or _places(parts, -(-len(stored) // ROWS), memory)
        at = first * step // ROWS
        for place, part in zip(places, parts, strict=True):
            if part.numel():
                place[at : at + len(part)] = part
    return GGUFTiles(kind, len(stored), columns, *places)


def _places(parts: tuple[Tensor, ...], blocks: int, memory: Tensor) -> list[Tensor]:
    """Room for such parts of all blocks of 16 rows, one part after the other."""
    found: list[Tensor] = []
    start = 0
    for part in parts:
        if not part.numel():
            found.append(found[0])
            continue
        shape = blocks, *part.shape[1:]
        size = blocks * part[0].nbytes
        found.append(memory[start : start + size].view(part.dtype).view(shape))
        start += size
    return found


def _to_tiles(kind: TileType, blocks: Tensor) -> tuple[Tensor, ...]:
    """Codes, upper bits, scales, and those of 256 columns; what there is not is empty."""
    codes, scale, low, wide_scale, wide_low = kind.parts(blocks)
    spare_rows, spare = -len(codes) % ROWS, -codes.shape[1] % COLUMNS
    padded = F.pad(codes, (0, spare, 0, spare_rows))
    padded = padded.unflatten(1, _SIZES[kind.group]).unflatten(0, (-1, 2, 8))
    padded = padded.permute(0, 1, 2, *(3 + axis for axis in _CHUNKS[kind.group]))
    nothing = padded.new_empty(0)
    upper = _packed(padded >> kind.bits, kind.upper) if kind.upper else nothing
    lower = _packed(padded & (1 << kind.bits) - 1, kind.bits)

    def by_rows(scale: Tensor, low: Tensor | None) -> Tensor:
        groups = spare * scale.shape[1] // codes.shape[1]
        pair = (scale,) if low is None else (scale, low)
        tiles = [by_tiles(F.pad(each, (0, groups, 0, spare_rows))) for each in pair]
        return torch.stack(tiles, -1).view(len(padded), -1)

    wide = nothing if wide_scale is None else by_rows(wide_scale, wide_low)
    return lower, upper, by_rows(scale, low), wide


def _packed(codes: Tensor, bits: int) -> Tensor:
    codes = codes.permute(_ORDER[bits]).reshape(len(codes), -1, 8 // bits)
    packed = codes[..., 0].clone()
    for i in range(1, 8 // bits):
        packed |= codes[..., i] << bits * i
    return packed


def numbers_of_tiles(matrix: GGUFTiles) -> Tensor:
    """`[rows, columns]` in float32: what the kernels are held to."""
    kind = matrix.kind
    codes = _unpacked(matrix.codes, kind.bits)
    if kind.upper:
        codes = codes | _unpacked(matrix.upper, kind.upper) << kind.bits
    back = [3 + _CHUNKS[kind.group].index(axis) for axis in range(len(_CHUNKS[kind.group]))]
    codes = codes.permute(0, 1, 2, *back).reshape(len(codes) * ROWS, -1)
    if kind.table:
        numbers = torch.tensor(kind.table, dtype=torch.float32, device=codes.device)[codes.int()]
    else:
        numbers = codes.float() - kind.zero
    has_pairs = kind.has_lows and kind.scales != NIBBLES
    scale, low = _spread(matrix.scale, codes.shape[1], has_pairs)
    if kind.scales == EXPONENTS:
        scale = torch.exp2(scale - 128)
    elif kind.scales != HALVES:
        if kind.scales == NIBBLES:
            scale, low = scale % 16, (scale / 16).floor()
        wide_scale, wide_low = _spread(matrix.wide, codes.shape[1], kind.has_lows)
        scale, low = (scale - kind.scale_zero) * wide_scale, low * -wide_low
    numbers = numbers * scale + (low if kind.has_lows else 0.0)
    return numbers[: matrix.rows, : matrix.columns]


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed[..., None] >> shifts) & (1 << bits) - 1
    shape = (1, 2, 8, 1, 4, 2, 2, 4, 2)
    order = _ORDER[bits]
    codes = codes.view(len(packed), -1, *(shape[axis] for axis in order[2:]))
    back = [order.index(axis) for axis in range(len(order))]
    return codes.permute(back)


def _spread(of_groups: Tensor, columns: int, has_pairs: bool) -> tuple[Tensor, Tensor]:
    """Scales and lows of all columns; where there is one alone, that twice."""
    found = of_groups.float().view(len(of_groups), -1, 8, 2, 2 if has_pairs else 1)
    found = found.permute(0, 3, 2, 1, 4).flatten(0, 2)
    found = found.repeat_interleave(columns // found.shape[1], dim=1)
    return found[:, :columns, 0], found[:, :columns, -1]


def _halves(bytes_: Tensor) -> Tensor:
    return bytes_.contiguous().view(torch.float16).flatten(1)


def _nibbles(packed: Tensor) -> Tensor:
    """`[…, bytes]`: the lower halves of all, then the upper."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _in_twos(packed: Tensor, bits: int = 2) -> Tensor:
    """`[…, bytes]`: the lowest bits of all, then the next."""
    return torch.cat([packed >> i & (1 << bits) - 1 for i in range(0, 8, bits)], dim=-1)


def _of_32(blocks: Tensor, low: bool = False, fifth: bool = False) -> Parts:
    """[ scale │ low │ fifth bits │ lower halves of codes 0 … 15, upper ones of 16 … 31 ]"""
    at = 4 if low else 2
    codes = _nibbles(blocks[..., -16:])
    if fifth:
        bits = _in_twos(blocks[..., at : at + 4, None], 1).flatten(-2)
        codes = codes | bits << 4
    lows = _halves(blocks[..., 2:4]) if low else None
    return Parts(codes.flatten(1), _halves(blocks[..., :2]), lows)


def _q8_0(blocks: Tensor) -> Parts:
    """Codes are signed bytes."""
    return Parts((blocks[..., 2:] ^ 128).flatten(1), _halves(blocks[..., :2]))


def _mxfp4(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 1:]).flatten(1), blocks[..., 0])


def _iq4_xs(blocks: Tensor) -> Parts:
    """[ scale │ upper bits of eight scales │ lower bits, two a byte │ codes ]"""
    lower = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    upper = torch.stack([blocks[..., 2:4] >> i & 3 for i in range(0, 8, 2)], -1).flatten(-2)
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    wide = _halves(blocks[..., :2])
    return Parts(codes.flatten(1), (lower | upper << 4).flatten(1), None, wide)


def _q2_k(blocks: Tensor) -> Parts:
    codes = _in_twos(blocks[..., 16:80].unflatten(-1, (2, 32)))
    scales = blocks[..., :16].flatten(1)
    return Parts(
        codes.flatten(1), scales, None, _halves(blocks[..., 80:82]), _halves(blocks[..., 82:84])
    )


def _q3_k(blocks: Tensor) -> Parts:
    third = _in_twos(blocks[..., :32], 1).unflatten(-1, (2, 128))
    codes = _in_twos(blocks[..., 32:96].unflatten(-1, (2, 32))) | third << 2
    upper = _in_twos(blocks[..., 104:108])
    scales = _nibbles(blocks[..., 96:104]) | upper << 4
    return Parts(codes.flatten(1), scales.flatten(1), None, _halves(blocks[..., 108:110]))


def _q45_k(blocks: Tensor, fifth: bool = False) -> Parts:
    """[ scale │ low │ eight scales and lows of six bits │ fifth bits │ codes ]"""
    first, second, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, both & 15 | first >> 6 << 4), -1)
    lows = torch.cat((second & 63, both >> 4 | second >> 6 << 4), -1)
    codes = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32)))
    if fifth:
        codes = codes | _in_twos(blocks[..., 16:48], 1).view_as(codes) << 4
    wide = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return Parts(codes.flatten(1), scales.flatten(1), lows.flatten(1), *wide)


def _q6_k(blocks: Tensor) -> Parts:
    lower = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    upper = _in_twos(blocks[..., 128:192].unflatten(-1, (2, 32)))
    scales = blocks[..., 192:208] ^ 128  # signed bytes
    return Parts(
        (lower | upper << 4).flatten(1), scales.flatten(1), None, _halves(blocks[..., 208:210])
    )


TILE_TYPES = {
    kind.name: kind
    for kind in (
        TileType("Q4_0", _of_32, zero=8),
        TileType("Q4_1", partial(_of_32, low=True), has_lows=True),
        TileType("Q5_0", partial(_of_32, fifth=True), upper=1, zero=16),
        TileType("Q5_1", partial(_of_32, low=True, fifth=True), upper=1, has_lows=True),
        TileType("Q8_0", _q8_0, bits=8, zero=128),
        TileType("IQ4_NL", _of_32, table=IQ4),
        TileType("IQ4_XS", _iq4_xs, scales=BYTES, scale_zero=32, table=IQ4),
        TileType("MXFP4", _mxfp4, scales=EXPONENTS, table=FP4),
        TileType("Q2_K", _q2_k, bits=2, group=16, scales=NIBBLES, has_lows=True),
        TileType("Q3_K", _q3_k, 2, 1, zero=4, group=16, scales=BYTES, scale_zero=32),
        TileType("Q4_K", _q45_k, scales=BYTES, has_lows=True),
        TileType("Q5_K", partial(_q45_k, fifth=True), upper=1, scales=BYTES, has_lows=True),
        TileType("Q6_K", _q6_k, 4, 2, zero=32, group=16, scales=BYTES, scale_zero=128),
    )
}
