"""`gemv` of weights that are codes of eight bits: half the bytes, so twice as fast.

Codes become float32 in registers and are multiplied there: the activations stay as they are, and a
result is as exact as the weights. What costs time beside memory are the instructions for each
weight, so codes are loaded as words of four, and a word is taken apart by a few instructions.
"""

from __future__ import annotations

from functools import cache as memoise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.codes import BlockScales
from quire.kernels.fp8 import FP8
from quire.kernels.triton.attention.fp8_pairs import has_conversion
from quire.kernels.triton.gemv import finish, load_bias, load_there
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

_ROWS = 2  # of x, at most
_CODES = 16  # in 16 bytes, which rows have to begin at
_VECTOR = 2  # words that a thread reads at once, for which it reads 16 bytes of x


class _Shape(NamedTuple):
    """Of a program: its warps, the words of a tile, the rows of the matrix that it takes; and how
    many such programs a multiprocessor runs at once: what it has registers for."""

    warps: int
    tile: int
    together: int
    at_once: int = 0


# Best is what takes the fewest rows and still runs all at once: a second wave that is not full
# would leave much of the device idle. Many waves are small programs' business. The last two, and
# many waves, were measured on an H200 with Qwen3-8B's shapes; the others are by their registers.
_ONE_WAVE = [
    _Shape(4, 256, 1, 16),
    _Shape(4, 256, 2, 11),
    _Shape(4, 256, 4, 7),
    _Shape(4, 512, 8, 4),
    _Shape(4, 256, 8, 6),
]
_MANY_WAVES = {True: _Shape(1, 256, 4), False: _Shape(4, 256, 8)}  # by whether rows have one scale

# A word of four e4m3 to four float32: there is an instruction from two codes to two float16.
_FROM_FP8: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high, a, b;
    .reg .b32 pair;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 $2, a;
    cvt.f32.f16 $3, b;
}""")
# A word of four int8, each put below the bits of 2 ** 23, from which it and 128 are subtracted:
# the instruction that converts whole numbers is four times as slow as others.
_FROM_INT8: tl.constexpr = tl.constexpr("""{
    .reg .b32 word, a, b, c, d;
    xor.b32 word, $4, 0x80808080;
    prmt.b32 a, word, 0x4B000000, 0x7540;
    prmt.b32 b, word, 0x4B000000, 0x7541;
    prmt.b32 c, word, 0x4B000000, 0x7542;
    prmt.b32 d, word, 0x4B000000, 0x7543;
    sub.f32 $0, a, 0f4B000080;
    sub.f32 $1, b, 0f4B000080;
    sub.f32 $2, c, 0f4B000080;
    sub.f32 $3, d, 0f4B000080;
}""")


def is_few(x: Tensor, weight: Tensor, scales: BlockScales) -> bool:
    """Whether `gemv` takes these."""
    if weight.dtype == FP8 and x.is_cuda and not has_conversion(x.device):
        return False
    return (
        (scales.is_by_rows or scales.columns % _CODES == 0)
        and 0 < x.shape[0] <= _ROWS
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.stride(1) == 1
        and x.shape[1] % _CODES == 0
        and x.stride(0) % 4 == x.storage_offset() % 4 == 0  # it is read by fours
        and weight.is_contiguous()
    )


def gemv(
    x: Tensor,
    weight: Tensor,
    scales: BlockScales,
    bias: Tensor | None,
    activation: Activation | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """`F.linear` by the numbers that `weight` and `scales` stand for, where `is_few`; with an
    activation, `act_and_mul` of that. The result is a new tensor, or what it was added to, which
    is contiguous."""
    gated = activation is not None
    rows, columns = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = add_to
    if out is None:
        out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    shape = _shape(features, gated, scales.is_by_rows, x.device)
    together = shape.together // 2 if gated else shape.together
    _gemv[(cdiv(features, together),)](
        x.view(torch.int64),
        weight.view(torch.int32),
        scales.values,
        out if bias is None else bias,
        out,
        x.stride(0) // 4,
        features,
        columns // 4,
        scales.values.stride(0),
        ROWS=rows,
        TOGETHER=together,
        TILE=shape.tile,
        VECTOR=_VECTOR,
        SCALE_ROWS=scales.rows,
        SCALE_COLUMNS=0 if scales.is_by_rows else scales.columns,
        FP8=weight.dtype == FP8,
        GATED=gated,
        GELU=activation is Activation.GELU_TANH,
        BIASED=bias is not None,
        ADDS=add_to is not None,
        IS_ASM=has_conversion(x.device),
        num_warps=shape.warps,
        **pdl_launch(x.device),
    )
    return out


@memoise
def _shape(features: int, gated: bool, is_by_rows: bool, device: torch.device) -> _Shape:
    there_are = processors(device, interpreted=1)
    halves = 2 if gated else 1
    for shape in _ONE_WAVE:
        programs = cdiv(features * halves, shape.together)
        if shape.together >= halves and programs <= there_are * shape.at_once:
            return shape
    return _MANY_WAVES[is_by_rows]


@triton.jit
def _gemv(
    x,
    weight,
    scales,
    bias,
    out,
    x_stride,
    features,
    words,
    scale_stride,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
    IS_ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns are counted in words of four."""
    halves: tl.constexpr = 2 if GATED else 1
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * TOGETHER
    # A gate's rows alternate: gate, up, gate, up.
    which = tl.arange(0, TOGETHER * halves)
    feature = first + which // halves
    live = feature < features
    row = feature + (which % halves) * features
    lane = tl.max_contiguous(tl.arange(0, TILE), VECTOR)
    source = weight + row.to(tl.int64)[:, None] * words + lane[None, :]
    tile = load_words(source, live, lane < words)
    scale_row = scales + row // SCALE_ROWS * scale_stride
    vector = tl.arange(0, TILE // VECTOR) * VECTOR
    if SCALE_COLUMNS > 0:
        scale = load_scales(scale_row, live, vector, words, SCALE_COLUMNS)
    else:
        scale = tl.load(scale_row, mask=live, other=0.0)
    added = load_bias(bias, row, live, BIASED)
    trigger_then_wait(PDL)

    last = features - first
    there = load_there(out + first, last, TOGETHER, ADDS)
    if ROWS > 1:
        more_there = load_there(out + features + first, last, TOGETHER, ADDS)
    sums = tl.zeros((TOGETHER * halves, TILE // VECTOR), tl.float32)
    more_sums = sums
    values = tl.load(x + lane, mask=lane < words, other=0)
    for start in range(0, words, TILE):
        column = start + lane
        following = column + TILE
        next_tile = load_words(source + (start + TILE), live, following < words)
        next_values = tl.load(x + following, mask=following < words, other=0)
        a, b, c, d = unpack_words(tile, FP8, IS_ASM)
        products = multiply_words(a, b, c, d, values, dtype, VECTOR)
        sums += products * scale if SCALE_COLUMNS > 0 else products
        if ROWS > 1:
            more_values = tl.load(x + x_stride + column, mask=column < words, other=0)
            products = multiply_words(a, b, c, d, more_values, dtype, VECTOR)
            more_sums += products * scale if SCALE_COLUMNS > 0 else products
        tile, values = next_tile, next_values
        if SCALE_COLUMNS > 0:
            scale = load_scales(scale_row, live, start + TILE + vector, words, SCALE_COLUMNS)

    result = tl.sum(sums, 1)
    if SCALE_COLUMNS == 0:
        result *= scale
    finish(result + added, out + first, last, TOGETHER, GATED, GELU, there, ADDS)
    if ROWS > 1:
        result = tl.sum(more_sums, 1)
        if SCALE_COLUMNS == 0:
            result *= scale
        to = out + features + first
        finish(result + added, to, last, TOGETHER, GATED, GELU, more_there, ADDS)


@triton.jit
def load_words(source, rows_live, columns_live):
    """Weights are read once: they leave the cache first."""
    mask = rows_live[:, None] & columns_live[None, :]
    return tl.load(source, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_scales(row, rows_live, word, words, SCALE_COLUMNS: tl.constexpr):
    """Those of each thread's vectors."""
    mask = rows_live[:, None] & (word < words)[None, :]
    return tl.load(row[:, None] + (word * 4 // SCALE_COLUMNS)[None, :], mask=mask, other=0.0)


@triton.jit
def unpack_words(words, FP8: tl.constexpr, IS_ASM: tl.constexpr):
    """The four numbers of each word, before they are scaled."""
    if IS_ASM:
        return tl.inline_asm_elementwise(
            _FROM_FP8 if FP8 else _FROM_INT8,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return _byte(words, 0, FP8), _byte(words, 8, FP8), _byte(words, 16, FP8), _byte(words, 24, FP8)


@triton.jit
def _byte(words, shift: tl.constexpr, FP8: tl.constexpr):
    code = (words >> shift).to(tl.int8)
    return (code.to(tl.float8e4nv, bitcast=True) if FP8 else code).to(tl.float32)


@triton.jit
def multiply_words(a, b, c, d, values, dtype: tl.constexpr, VECTOR: tl.constexpr):
    """The sums over each thread's own columns; threads meet only at the end."""
    products = a * half_of(values, 0, dtype)[None, :]
    products += b * half_of(values, 16, dtype)[None, :]
    products += c * half_of(values, 32, dtype)[None, :]
    products += d * half_of(values, 48, dtype)[None, :]
    rows: tl.constexpr = products.shape[0]
    return tl.sum(tl.reshape(products, (rows, products.shape[1] // VECTOR, VECTOR)), 2)


@triton.jit
def half_of(values, shift: tl.constexpr, dtype: tl.constexpr):
    """One of the four numbers of 16 bits in each 64."""
    return (values >> shift).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
