"""`grouped.py` for weights of four bits, which become numbers in registers.

How they lie is said in `kernels/four_bits.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.activation import Gating
from quire.kernels.four_bits import GROUP, FourBitExperts
from quire.kernels.triton.experts.gating import gating_of, join
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.experts.tiles import Tile
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait

# Four bytes of E2M1 codes to four bfloat16: the lower codes of each. Exponent and fraction of a
# code, put where bfloat16 has those of its smallest numbers, are the number divided by 2 ** 126.
# Scales are multiplied by most of that, and sums by the rest, so that no scale up to 2 ** 17 is too
# large for bfloat16, and none from 2 ** -109 on too small.
_E2M1 = """{
.reg .b32 p, q, m, n;
prmt.b32 p, $2, 0, 0x4140;
prmt.b32 q, $2, 0, 0x4342;
MAGNITUDE
SIGN
and.b32 m, m, 0x01C001C0;
and.b32 n, n, 0x01C001C0;
lop3.b32 m, p, 0x80008000, m, 0xEA;
lop3.b32 n, q, 0x80008000, n, 0xEA;
mul.rn.bf16x2 $0, m, $3;
mul.rn.bf16x2 $1, n, $4;
}"""


def _asm(magnitude: int, sign: int) -> tl.constexpr:
    """By how far to shift a byte's codes."""
    shifts = {
        "MAGNITUDE": f"shl.b32 m, p, {magnitude};\nshl.b32 n, q, {magnitude};",
        "SIGN": f"shl.b32 p, p, {sign};\nshl.b32 q, q, {sign};",
    }
    text = _E2M1
    for name, lines in shifts.items():
        text = text.replace(name, lines)
    return tl.constexpr(text)


_IN_SCALES, _DIVISOR = tl.constexpr(110), tl.constexpr(65536.0)  # 126 and 0, less 16 and 16 more
_LOWER, _UPPER = _asm(6, 12), _asm(2, 8)


@triton.jit
def numbers_of(bytes, words, PLACE: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    """The lower or, from the third `PLACE` on, the upper codes of a tile of bytes, times two to the
    exponents at that place of each row's word; FAST: divided by `_DIVISOR`."""
    exponents = (words >> (8 * PLACE)) & 255
    if FAST:
        bits = ((exponents + _IN_SCALES) << 7).to(tl.int16)
        scales = bits.to(tl.bfloat16, bitcast=True)[:, None]
        numbers = tl.inline_asm_elementwise(
            _UPPER if PLACE > 1 else _LOWER,
            "=r,=r,r,r,r",
            [bytes, scales.broadcast_to(bytes.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        code = (bytes >> 4 if PLACE > 1 else bytes & 15).to(tl.int32)
        exponent, fraction = (code >> 1) & 3, code & 1
        quarters = tl.where(exponent == 0, fraction * 2, (fraction + 2) << exponent)
        numbers = tl.where(code >= 8, -quarters, quarters).to(tl.float32) * 0.25
        numbers = (numbers * tl.exp2(exponents.to(tl.float32) - 127)[:, None]).to(dtype)
    return numbers


def gated_product(
    x: Tensor,
    weights: FourBitExperts,
    blocks: Blocks,
    top_k: int,
    activation: Gating,
    bias: Tensor | None,
    tile: Tile,
) -> Tensor:
    """`[pairs, features]` in the order of experts."""
    return _product(x, weights, blocks, top_k, activation, bias, tile)


def product(
    x: Tensor, weights: FourBitExperts, blocks: Blocks, bias: Tensor | None, tile: Tile
) -> Tensor:
    """From pairs in the order of experts to `[pairs, outputs]`, token by token; what goes nowhere
    is left as it was."""
    return _product(x, weights, blocks, 1, None, bias, tile)


def _product(
    x: Tensor,
    weights: FourBitExperts,
    blocks: Blocks,
    top_k: int,
    activation: Gating | None,
    bias: Tensor | None,
    tile: Tile,
) -> Tensor:
    codes, exponents = weights
    gated = activation is not None
    features = codes.shape[1] // (2 if gated else 1)
    out = torch.empty((len(blocks.order), features), dtype=x.dtype, device=x.device)
    _multiply[(blocks.number * triton.cdiv(features, tile.columns),)](
        x,
        TensorDescriptor.from_tensor(codes.flatten(0, 1), [tile.columns, GROUP]),
        exponents,
        out if bias is None else bias,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        features,
        x.shape[1],
        top_k,
        GATED=gated,
        BIASED=bias is not None,
        **gating_of(activation),
        GROUP=GROUP,
        BLOCK=blocks.size,
        COLUMNS=tile.columns,
        FAST=is_fast(x),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_launch(x.device),
    )
    return out


def is_fast(x: Tensor) -> bool:
    """Whether the device multiplies pairs of bfloat16."""
    return (
        x.dtype == torch.bfloat16
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] >= 9
    )


@triton.jit(do_not_specialize=["most", "top_k"])
def _multiply(
    x,
    codes,
    exponents,
    bias,
    out,
    order,
    table,
    most,
    features,
    size,
    top_k,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    across = tl.cdiv(features, COLUMNS)
    block = tl.program_id(0) // across  # its programs are neighbours: they read the same tokens
    first = tl.program_id(0) % across * COLUMNS
    trigger_then_wait(PDL)
    expert = tl.load(table + block)
    if expert < 0:
        return
    place = tl.load(table + most + block) + tl.arange(0, BLOCK)
    is_pair = place < tl.load(table + 2 * most + block)
    pair = tl.load(order + place, mask=is_pair, other=0)
    # A gate's input is a token's, and its results lie by expert; of the second product both turn.
    source = pair // top_k if GATED else place
    target = place if GATED else pair
    height = features * 2 if GATED else features
    column = first + tl.arange(0, COLUMNS)
    is_column = column < features
    half = size // 2
    lane = tl.arange(0, GROUP)
    inputs = x + source.to(tl.int64)[:, None] * size + lane[None, :]
    row = expert * height + first
    words = exponents + expert.to(tl.int64) * height * tl.cdiv(half, 2 * GROUP) + column
    sums = tl.zeros((COLUMNS, BLOCK), tl.float32)
    more_sums = sums
    for start in range(0, half, 2 * GROUP):
        word = tl.load(words, mask=is_column, other=0)
        more_word = word
        if GATED:
            more_word = tl.load(words + features, mask=is_column, other=0)
        words += height
        for part in tl.static_range(2):
            at = start + part * GROUP
            live = is_pair[:, None] & (at + lane < half)[None, :]
            low = tl.trans(tl.load(inputs + at, mask=live, other=0.0))
            high = tl.trans(tl.load(inputs + half + at, mask=live, other=0.0))
            tile = codes.load([row, at])
            sums = tl.dot(numbers_of(tile, word, part, FAST, dtype), low, sums)
            sums = tl.dot(numbers_of(tile, word, part + 2, FAST, dtype), high, sums)
            if GATED:
                tile = codes.load([row + features, at])
                low_numbers = numbers_of(tile, more_word, part, FAST, dtype)
                more_sums = tl.dot(low_numbers, low, more_sums)
                high_numbers = numbers_of(tile, more_word, part + 2, FAST, dtype)
                more_sums = tl.dot(high_numbers, high, more_sums)
    if FAST:
        sums *= _DIVISOR
        more_sums *= _DIVISOR
    if BIASED:
        of_row = bias + row + tl.arange(0, COLUMNS)
        sums += tl.load(of_row, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if GATED:
            added = tl.load(of_row + features, mask=is_column, other=0.0)
            more_sums += added.to(tl.float32)[:, None]
    result = sums.to(dtype)
    if GATED:
        result = join(sums, more_sums, dtype, GELU, CLAMPED, ALPHA, LIMIT)
    to = out + target.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(to, tl.trans(result), mask=is_pair[:, None] & is_column[None, :])
