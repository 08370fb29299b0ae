"""One or two rows times a matrix of one of GGUF's types, by integer tensor cores.

A program has 16 rows of the matrix and all columns, which its warps share. The weights are the left
factor, as bytes (`code_bytes.py`); a row of x is the right one, as two digits for each of a tile's
four chunks (`digits.py`). So a product has both digits of all groups, or of those of one fragment,
side by side, and each thread scales what it has of one group. Sums of codes and digits are exact.

The first steps are asked for before the kernel ahead is done (`pdl.py`), and others as registers
get free: a turn of the loop is so many steps that nothing is moved between registers.
"""

from __future__ import annotations

from functools import cache as memoise
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gguf_tiles import GGUFTiles, TileType
from quire.kernels.triton.digit_steps import BASE
from quire.kernels.triton.gguf.code_bytes import (
    byte_instructions,
    code_bytes,
    is_signed,
    load_codes,
    order_of,
    rows_at_once,
    unit,
)
from quire.kernels.triton.gguf.digits import digits
from quire.kernels.triton.gguf.scales import scales_of_rows, wide_of_rows, words_of
from quire.kernels.triton.gguf.unpack import HALVES, NIBBLES, with_another
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv

MOST_ROWS = 2  # of x: each program makes digits of all of them
_WARPS = 4


class Shape(NamedTuple):
    """How a program goes through its tiles."""

    warps: int  # an even number; each has one tile of a step
    ahead: int  # steps


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
        matrix.upper,
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
    is_short = steps <= 8 and matrix.kind.bits + matrix.kind.upper <= 4
    return Shape(_WARPS, steps if is_short else min(4, steps))


@memoise
def _of_kind(kind: TileType, fast: bool) -> dict[str, Any]:
    """What kernels are compiled for. EXCESS: how much codes are too large as bytes; UNIT: what they
    count by."""
    asm, constraints = byte_instructions(kind)
    return {
        "BITS": kind.bits,
        "UPPER": kind.upper,
        "ZERO": kind.zero,
        "GROUP": kind.group,
        "SCALES": kind.scales,
        "SCALE_ZERO": kind.scale_zero,
        "LOWS": kind.has_lows,
        "WIDE": kind.scales in (1, 2),
        "TABLE": kind.table,
        "ORDER": order_of(kind),
        "EXCESS": kind.zero if fast and not is_signed(kind) else 0,
        "UNIT": unit(kind) if fast else 1,
        "ROWS_AT_ONCE": rows_at_once(kind),
        "ASM": asm,
        "CONSTRAINTS": constraints,
    }


@triton.jit
def _few_rows(
    x,
    codes,
    upper,
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
    UPPER: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
    ORDER: tl.constexpr,
    EXCESS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
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
                codes, upper, scale, wide, block, 0, i * WARPS, tiles, WARPS,
                BITS, UPPER, GROUP, SCALES, LOWS, WIDE,
            ),
        )  # fmt: skip
    trigger_then_wait(PDL)

    sums = tl.zeros((WARPS, 2, 8, 4), tl.float32)
    second = sums  # row of x
    for turn in range((tiles + AHEAD * WARPS - 1) // (AHEAD * WARPS)):
        coming = ()
        following = (turn + 1) * (AHEAD * WARPS)
        for i in tl.static_range(AHEAD):
            start = turn * (AHEAD * WARPS) + i * WARPS
            left = code_bytes(
                ring[i][0], BITS, UPPER, ZERO, GROUP, TABLE, FAST, ROWS_AT_ONCE, ASM, CONSTRAINTS
            )
            scales = _scales(ring[i][1], ring[i][2], SCALES, SCALE_ZERO, LOWS, WIDE, FAST)
            right, worth = digits(x, start, COLUMNS, WARPS, AHEAD, GROUP, ORDER, FAST)
            sums += _multiply(left, right, scales, worth, LOWS, WIDE, EXCESS, UNIT)
            if ROWS == 2:
                right, worth = digits(
                    x + x_stride, start, COLUMNS, WARPS, AHEAD, GROUP, ORDER, FAST
                )
                second += _multiply(left, right, scales, worth, LOWS, WIDE, EXCESS, UNIT)
            coming = with_another(
                coming,
                _load_step(
                    codes, upper, scale, wide, block, following, i * WARPS, tiles, WARPS,
                    BITS, UPPER, GROUP, SCALES, LOWS, WIDE,
                ),
            )  # fmt: skip
        ring = coming

    _store(sums, bias, out, block, features, BIASED)
    if ROWS == 2:
        _store(second, bias, out + out_stride, block, features, BIASED)


@triton.jit
def _load_step(
    codes,
    upper,
    scale,
    wide,
    block,
    start,
    PLACE: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile for each warp, from PLACE behind `start` on: codes; words of scales `[32,
    tiles]`, of which each thread has those of its rows and of its one or two groups; and what two
    tiles share.

    Of tiles that there are not, all are zeros.
    """
    tile = tl.arange(0, WARPS)
    live = tile < TILES - start - PLACE
    number = block.to(tl.int64) * TILES + start + tile
    found = load_codes(codes, upper, number, live, PLACE, BITS, UPPER)

    pairs: tl.constexpr = LOWS and SCALES != NIBBLES
    size: tl.constexpr = (2 if SCALES == HALVES else 1) * (4 if pairs else 2)
    thread = tl.arange(0, 32)[:, None]
    at = (number * (1024 // GROUP))[None, :] + (thread % 4 * (256 // GROUP) + thread // 4)
    groups = ()
    for i in tl.static_range(32 // GROUP):
        source = words_of(scale, size) + at + (i * 8 + PLACE * (1024 // GROUP))
        groups = with_another(groups, tl.load(source, mask=live[None, :], other=0))
    shared = number
    if WIDE:
        at = (number // 2 * 8)[None, :] + thread // 4
        source = words_of(wide, 8 if LOWS else 4) + at + PLACE // 2 * 8
        shared = tl.load(source, mask=live[None, :], other=0)
    return found, groups, shared


@triton.jit
def _scales(
    groups,
    shared,
    SCALES: tl.constexpr,
    SCALE_ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """As sums lie: the scales and lows of each group, and the factors of both."""
    result = ()
    for i in tl.static_range(len(groups)):
        found = scales_of_rows(groups[i], SCALES, SCALE_ZERO, LOWS, FAST)
        result = with_another(result, _of_rows(found, LOWS))
    if WIDE:
        result = with_another(result, _of_rows(wide_of_rows(shared, LOWS), LOWS))
    return result


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
    worth,
    LOWS: tl.constexpr,
    WIDE: tl.constexpr,
    EXCESS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Each tile's sums `[tiles, row g or g + 8, g, chunk]`."""
    tiles: tl.constexpr = worth.shape[0]
    scaled = tl.zeros((tiles, 2, 8, 4), tl.float32)
    lowered = scaled
    for i in tl.static_range(len(left)):
        found = tl.dot(left[i], right[i], out_dtype=tl.int32)
        if EXCESS > 0:
            found = tl.dot(_filled(left[i], -EXCESS), right[i], found, out_dtype=tl.int32)
        scaled += _whole(found) * scales[i][0]
        if LOWS:
            counts = tl.dot(_filled(left[i], 1), right[i], out_dtype=tl.int32)
            lowered += _of_first_row(_whole(counts)) * scales[i][1]
    if WIDE:
        scaled *= scales[len(left)][0]
        lowered *= scales[len(left)][1]
    if LOWS:
        scaled += lowered
    return scaled * (worth * (1.0 / UNIT))[:, None, None, None]


@triton.jit
def _filled(like, NUMBER: tl.constexpr):
    return tl.full(like.shape, NUMBER, tl.int8)


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
