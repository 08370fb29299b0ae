"""One or two rows times a matrix of most of GGUF's types, by integer tensor cores.

A program has 16 rows of the matrix and all columns, which its warps share. The weights are the left
factor, as bytes (`code_bytes.py`); a row of x is the right one, as two digits for each of a tile's
four chunks (`digits.py`), which are groups. So a product has both digits of all groups side by
side, and each thread scales what it has of one. Sums of codes and digits are exact.

The first steps are asked for before the kernel ahead is done (`pdl.py`), and others as registers
get free: a turn of the loop is so many steps that nothing is moved between registers.
"""

from __future__ import annotations

from functools import cache as memoise
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gguf_tiles import BYTES, GGUFTiles, TileType
from quire.kernels.triton.digit_steps import BASE
from quire.kernels.triton.gguf.code_bytes import byte_instructions, code_bytes, order_of, unit
from quire.kernels.triton.gguf.digits import digits
from quire.kernels.triton.gguf.scales import scales_of_rows, wide_of_rows, words_of
from quire.kernels.triton.gguf.unpack import HALVES, load_words, with_another
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

MOST_ROWS = 2  # of x: each program makes digits of all of them
_WARPS = 4


class Shape(NamedTuple):
    """How a program goes through its tiles."""

    warps: int  # an even number; each has one tile of a step
    ahead: int  # steps


def fits(rows: int, kind: TileType) -> bool:
    """Whether there are few enough rows of x, and codes have no bits apart."""
    return rows <= MOST_ROWS and kind.group == 32 and not kind.upper


def few_rows(
    x: Tensor,
    matrix: GGUFTiles,
    bias: Tensor | None,
    out: Tensor,
    fast: bool,
    shape: Shape | None = None,
) -> None:
    rows, columns = x.shape
    shape = shape or shape_for(matrix)
    _few_rows[(cdiv(matrix.rows, 16),)](
        x,
        matrix.codes,
        matrix.scale,
        matrix.wide,
        out if bias is None else bias,
        out,
        x.stride(0),
        out.stride(0),
        matrix.rows,
        COLUMNS=columns,
        ROWS=rows,
        WARPS=shape.warps,
        AHEAD=shape.ahead,
        BIASED=bias is not None,
        FAST=fast,
        **_of_kind(matrix.kind, fast),
        num_warps=shape.warps,
        num_stages=1,
        **pdl_launch(x.device),
    )


def shape_for(matrix: GGUFTiles) -> Shape:
    """As many steps ahead as there are registers for, in 128 of a thread: all of a short row."""
    steps = cdiv(matrix.tiles, _WARPS)
    is_short = steps <= 8 and matrix.kind.bits == 4
    return Shape(_WARPS, steps if is_short else min(4, steps))


@memoise
def _of_kind(kind: TileType, fast: bool) -> dict[str, Any]:
    """What kernels are compiled for. UNIT: what codes count by."""
    asm, constraints = byte_instructions(kind)
    return {
        "BITS": kind.bits,
        "ZERO": kind.zero,
        "SCALES": kind.scales,
        "SCALE_ZERO": kind.scale_zero,
        "LOWS": kind.has_lows,
        "WIDE": kind.scales == BYTES,
        "TABLE": kind.table,
        "ORDER": order_of(kind),
        "UNIT": unit(kind) if fast else 1,
        "ASM": asm,
        "CONSTRAINTS": constraints,
    }


@triton.jit
def _few_rows(
    x,
    codes,
    scale,
    wide,
    bias,
    out,
    x_stride,
    out_stride,
    features,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BIASED: tl.constexpr,
    FAST: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
    ORDER: tl.constexpr,
    UNIT: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (COLUMNS + 127) // 128
    block = tl.program_id(0)
    ring = ()
    for i in tl.static_range(AHEAD):
        ring = with_another(
            ring,
            _load_step(
                codes, scale, wide, block, 0, i * WARPS, tiles, WARPS, BITS, SCALES, LOWS, WIDE
            ),
        )
    trigger_then_wait(PDL)

    sums = tl.zeros((WARPS, 2, 8, 4), tl.float32)
    second = sums  # row of x
    for turn in range((tiles + AHEAD * WARPS - 1) // (AHEAD * WARPS)):
        coming = ()
        following = (turn + 1) * (AHEAD * WARPS)
        for i in tl.static_range(AHEAD):
            start = turn * (AHEAD * WARPS) + i * WARPS
            left = code_bytes(ring[i][0], BITS, ZERO, TABLE, FAST, ASM, CONSTRAINTS)
            scales = _of_rows(scales_of_rows(ring[i][1], SCALES, SCALE_ZERO, LOWS, FAST), LOWS)
            factors = scales
            if WIDE:
                factors = _of_rows(wide_of_rows(ring[i][2], LOWS), LOWS)
            right, worth = digits(x, start, COLUMNS, WARPS, AHEAD, ORDER, FAST)
            sums += _multiply(left, right, scales, factors, worth, LOWS, WIDE, UNIT)
            if ROWS == 2:
                right, worth = digits(x + x_stride, start, COLUMNS, WARPS, AHEAD, ORDER, FAST)
                second += _multiply(left, right, scales, factors, worth, LOWS, WIDE, UNIT)
            coming = with_another(
                coming,
                _load_step(
                    codes, scale, wide, block, following, i * WARPS, tiles, WARPS,
                    BITS, SCALES, LOWS, WIDE,
                ),
            )  # fmt: skip
        ring = coming

    _store(sums, bias, out, block, features, BIASED)
    if ROWS == 2:
        _store(second, bias, out + out_stride, block, features, BIASED)


@triton.jit
def _load_step(
    codes,
    scale,
    wide,
    block,
    start,
    PLACE: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile for each warp, from PLACE behind `start` on: codes; words of scales `[32, tiles]`, of
    which each thread has those of its rows and its group; and what two tiles share.

    Of tiles that there are not, all are zeros.
    """
    tile = tl.arange(0, WARPS)
    live = tile < TILES - start - PLACE
    number = block.to(tl.int64) * TILES + start + tile
    found = load_words(codes, number, live, BITS, PLACE)

    size: tl.constexpr = (2 if SCALES == HALVES else 1) * (4 if LOWS else 2)
    thread = tl.arange(0, 32)[:, None]
    at = (number * 32)[None, :] + (thread % 4 * 8 + thread // 4)
    source = words_of(scale, size) + at + PLACE * 32
    scales = tl.load(source, mask=live[None, :], other=0)
    shared = number
    if WIDE:
        at = (number // 2 * 8)[None, :] + thread // 4
        source = words_of(wide, 8 if LOWS else 4) + at + PLACE // 2 * 8
        shared = tl.load(source, mask=live[None, :], other=0)
    return found, scales, shared


@triton.jit
def _of_rows(found, LOWS: tl.constexpr):
    scales = _as_sums(found[0], found[1])
    lows = scales
    if LOWS:
        lows = _as_sums(found[2], found[3])
    return scales, lows


@triton.jit
def _as_sums(first, second):
    """What thread `4 g + t` has of rows g and g + 8, `[tiles, 2, g, t]`."""
    both = tl.reshape(tl.join(first, second), (8, 4, first.shape[1], 2))
    return tl.permute(both, (2, 3, 0, 1))


@triton.jit
def _multiply(
    left,
    right,
    scales,
    factors,
    worth,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Each tile's sums `[tiles, row g or g + 8, g, chunk]`."""
    scaled = _whole(tl.dot(left, right, out_dtype=tl.int32)) * scales[0]
    if WIDE:
        scaled *= factors[0]
    if LOWS:
        ones = tl.full(left.shape, 1, tl.int8)
        counts = _whole(tl.dot(ones, right, out_dtype=tl.int32))
        lowered = _of_first_row(counts) * scales[1]
        if WIDE:
            lowered *= factors[1]
        scaled += lowered
    return scaled * (worth * (1.0 / UNIT))[:, None, None, None]


@triton.jit
def _whole(found):
    """Of both digits' sums, which are side by side, those of numbers."""
    high, low = tl.split(tl.reshape(found, (found.shape[0], 2, 8, 4, 2)))
    return (high * BASE + low).to(tl.float32)


@triton.jit
def _of_first_row(counts):
    """In place of a thread's second row, which has the same."""
    first, _ = tl.split(tl.permute(counts, (0, 2, 3, 1)))
    return first[:, None, :, :]


@triton.jit
def _store(sums, bias, out, block, features, BIASED: tl.constexpr):
    """A row of x's results: the sums of all chunks, tiles and warps."""
    sums = tl.reshape(tl.permute(sums, (0, 3, 1, 2)), (sums.shape[0] * 4, 16))
    result = tl.sum(sums, 0)
    feature = block * 16 + tl.arange(0, 16)
    is_feature = feature < features
    if BIASED:
        result += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)
    tl.store(out + feature, result.to(out.dtype.element_ty), mask=is_feature)
