"""Rows of a matrix of one of GGUF's types as numbers: for an embedding, and for products of so many
rows that the writing is little beside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gguf_tiles import COLUMNS, GGUFTiles
from quire.kernels.triton.gguf.unpack import (
    HALVES,
    NIBBLES,
    half_of,
    low_of,
    number_of,
    scale_of,
)
from quire.kernels.triton.sizes import cdiv

_ROWS = 16  # of a program: those of one tile, if they follow one another


def dequantise(matrix: GGUFTiles, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """All rows, or those of these numbers, `[rows, columns]`, each number rounded once."""
    kind = matrix.kind
    count = matrix.rows if rows is None else len(rows)
    out = torch.empty((count, matrix.columns), dtype=dtype, device=matrix.codes.device)
    if count:
        _dequantise[(cdiv(count, _ROWS), matrix.tiles)](
            matrix.codes,
            matrix.upper,
            matrix.scale,
            matrix.wide,
            matrix.codes if rows is None else rows,
            out,
            count,
            matrix.columns,
            matrix.tiles,
            BITS=kind.bits,
            UPPER=kind.upper,
            ZERO=kind.zero,
            GROUP=kind.group,
            SCALES=kind.scales,
            SCALE_ZERO=kind.scale_zero,
            LOWS=kind.has_lows,
            WIDE=kind.scales in (1, 2),
            TABLE=kind.table,
            CHOSEN=rows is not None,
            ROWS=_ROWS,
            WIDTH=COLUMNS,
        )
    return out


@triton.jit(do_not_specialize=["count"])
def _dequantise(
    codes,
    upper,
    scale,
    wide,
    chosen,
    out,
    count,
    columns,
    tiles,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = number
    if CHOSEN:
        row = tl.load(chosen + number, mask=number < count, other=0).to(tl.int32)
    tile = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    live = (number < count)[:, None] & (tile * WIDTH + column < columns)[None, :]

    block = (row // 16).to(tl.int64)
    number_of_tile = (block * tiles + tile)[:, None]
    code = _code(codes, number_of_tile, row, column, live, BITS, GROUP, WIDTH)
    if UPPER > 0:
        code |= _code(upper, number_of_tile, row, column, live, UPPER, GROUP, WIDTH) << BITS
    lies = (row % 8 * 2 + row // 8 % 2)[:, None]
    at = (number_of_tile * (WIDTH // GROUP) + (column // GROUP)[None, :]) * 16 + lies
    pairs: tl.constexpr = LOWS and SCALES != NIBBLES
    if pairs:
        at *= 2
    stored = _bits(scale, at, live, SCALES == HALVES)
    scales = scale_of(stored, SCALES, SCALE_ZERO)
    lows = scales
    if LOWS:
        if pairs:
            stored = _bits(scale, at + 1, live, SCALES == HALVES)
        lows = low_of(stored, SCALES)
    if WIDE:
        # As wide as the mask of its load: Triton 3.4 does not broadcast one to the other.
        at = (number_of_tile // 2) * 16 + lies + (column * 0)[None, :]
        if LOWS:
            at *= 2
            lows *= -half_of(_bits(wide, at + 1, live, True))
        scales *= half_of(_bits(wide, at, live, True))
    result = number_of(code, ZERO, TABLE) * scales
    if LOWS:
        result += lows
    target = out + number.to(tl.int64)[:, None] * columns + (tile * WIDTH + column)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _code(
    packed,
    tile,
    row,
    column,
    live,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Found at its place in a tile (`kernels/gguf_tiles.py`)."""
    if GROUP == 32:
        t, fragment = column // 8 % 4, column // 4 % 2
    else:
        t, fragment = column // 4 % 4, column // 16 % 2
    thread = (row % 8 * 4)[:, None] + t[None, :]
    half, fragment = (row // 8 % 2)[:, None], fragment[None, :]
    last = (column // 2 % 2 * 8 + column % 2 * 4 + column // 32)[None, :]
    if BITS == 8:
        place = ((fragment * 2 + half) * 32 + thread) * 16 + last
    elif BITS == 4:
        place = ((fragment * 32 + thread) * 2 + half) * 16 + last
    else:
        place = ((thread * 2 + fragment) * 2 + half) * 16 + last
    source = packed + (tile * (2 * WIDTH * BITS) + place // (8 // BITS))
    byte = tl.load(source, mask=live, other=0).to(tl.int32)
    return (byte >> (place % (8 // BITS) * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _bits(numbers, at, live, ARE_HALVES: tl.constexpr):
    if ARE_HALVES:
        numbers = numbers.to(tl.pointer_type(tl.int16))
    return tl.load(numbers + at, mask=live, other=0).to(tl.int32)
