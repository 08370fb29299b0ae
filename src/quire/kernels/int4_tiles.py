"""Four-bit codes in the order in which tensor cores take them, so that a GPU unpacks in registers.

A tile is 16 rows by 128 columns, 1 KiB. Of these a warp multiplies 16 by 16 at a time, a fragment,
of which each thread holds eight numbers: thread `4 g + t` has rows `g` and `g + 8`, and of either
columns `2 t`, `2 t + 1`, `2 t + 8` and `2 t + 9`. So a tile holds, thread by thread, 16 bytes that
are one load, twice:

    a tile    [2 fragments][32 threads][row g or g + 8][columns from 0 or 8][2 columns]   uint16
    a uint16  [4 chunks]                                                                  codes

The four codes of a uint16 are of four chunks of 32 columns, the lowest bits of the first: a shift
and a mask find a code in either half of a register, which is how tensor cores want their pairs.

Scales and zeros lie by 16 rows, too: `[rows / 16][groups][g][row g or g + 8]`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.kernels.dequantise import pack_nibbles, unpack_nibbles

ROWS, COLUMNS = 16, 128
CHUNK = 32  # columns of a tile whose codes have the same place in their uint16


class Int4Tiles(NamedTuple):
    """A four-bit matrix in tiles, as kernels take it; its scales and zeros by tiles, too."""

    words: Tensor  # int16 [out_features, in_features / 4]
    scale: Tensor  # [out_features, groups]
    zero: Tensor | None  # uint8, as scales; None: the zero is the middle code
    group: int  # columns that share a scale


def has_tiles(rows: int, columns: int, group: int) -> bool:
    """Whether a matrix consists of whole tiles, and chunks have one scale a row."""
    return rows % ROWS == 0 and columns % COLUMNS == 0 and group % CHUNK == 0


def to_tiles(packed: Tensor) -> Tensor:
    """Codes two a byte, row by row (`pack_nibbles`), to as many bytes tile by tile."""
    codes = unpack_nibbles(packed).view(-1, 2, 8, packed.shape[1] * 2 // COLUMNS, 4, 2, 2, 4, 2)
    #  block, half, g, tile, chunk, fragment, k8, t, pair -> … uint16, chunk
    codes = codes.permute(0, 3, 5, 2, 7, 1, 6, 8, 4).reshape(packed.shape[0], -1)
    return pack_nibbles(codes)


def rows_of_tiles(tiles: Tensor, rows: Tensor) -> Tensor:
    """Some rows of codes, one a byte, out of what `to_tiles` made."""
    bytes_of_row = tiles.shape[1]
    lanes = tiles.view(-1, bytes_of_row // 64, 2, 8, 4, 2, 2, 2, 2)
    #  block, tile, fragment, g, t, half, k8, pair, byte of the uint16
    within = rows % ROWS
    found = lanes[rows // ROWS, :, :, within % 8, :, within // 8]
    codes = unpack_nibbles(found)  # row, tile, fragment, t, k8, pair, chunk
    return codes.permute(0, 1, 6, 2, 4, 3, 5).reshape(len(rows), 2 * bytes_of_row)


def by_tiles(of_groups: Tensor) -> Tensor:
    """Scales or zeros `[rows, groups]` to the order of tiles, in the same shape."""
    return of_groups.view(-1, 2, 8, of_groups.shape[1]).permute(0, 3, 2, 1).reshape_as(of_groups)


def rows_by_tiles(of_groups: Tensor, rows: Tensor) -> Tensor:
    """Some rows out of what `by_tiles` made."""
    blocks = of_groups.view(-1, of_groups.shape[1], 8, 2)
    within = rows % ROWS
    found: Tensor = blocks[rows // ROWS, :, within % 8, within // 8]
    return found
