"""Rows of a matrix of one of GGUF's types as numbers: for an embedding, and for products of so many
rows that the writing is little beside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gguf_tiles import COLUMNS, GGUFTiles
from quire.kernels.triton.gguf.unpack import load_scales, load_wide, number_of
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
            matrix.low,
            matrix.wide_scale,
            matrix.wide_low,
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
    low,
    wide_scale,
    wide_low,
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

    # Its place among a tile's codes (`kernels/gguf_tiles.py`).
    of_row = row % 8 * 128 + row // 8 % 2 * 16
    of_column = column // 16 % 2 * 1024 + column // 2 % 4 * 32 + column // 8 % 2 * 8
    of_column += column % 2 * 4 + column // 32
    place = of_row[:, None] + of_column[None, :]
    block = (row // 16).to(tl.int64)
    first = (block * tiles + tile)[:, None] * (16 * WIDTH)
    code = _code(codes, first, place, live, BITS)
    if UPPER > 0:
        code |= _code(upper, first, place, live, UPPER) << BITS

    lies = (row % 8 * 2 + row // 8 % 2)[:, None]
    group = (block * tiles + tile)[:, None] * (WIDTH // GROUP) + (column // GROUP)[None, :]
    scales, lows = load_scales(scale, low, group * 16 + lies, live, SCALES, SCALE_ZERO, LOWS)
    wide = (block * (tiles // 2) + tile // 2)[:, None] * 16 + lies
    of_wide = (number < count)[:, None]
    factor, low_factor = load_wide(wide_scale, wide_low, wide, of_wide, SCALES, LOWS)
    result = number_of(code, ZERO, TABLE) * (scales * factor)
    if LOWS:
        result += lows * low_factor
    target = out + number.to(tl.int64)[:, None] * columns + (tile * WIDTH + column)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _code(packed, first, place, live, BITS: tl.constexpr):
    source = packed + (first // (8 // BITS) + place // (8 // BITS))
    byte = tl.load(source, mask=live, other=0).to(tl.int32)
    return (byte >> (place % (8 // BITS) * BITS)) & ((1 << BITS) - 1)
