"""From sums of `hopper_fours.py` to results, in their places. What is joined how is said in
`gating.py`, whose functions are Triton's; these are Gluon's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.experts import unpack

_ROUND_BOTH: gl.constexpr = gl.constexpr("""{
.reg .b32 both;
cvt.rn.bf16x2.f32 both, $3, $2;
shl.b32 $0, both, 16;
and.b32 $1, both, 0xFFFF0000;
}""")
_DIVISOR: gl.constexpr = gl.constexpr(unpack.DIVISOR.value)


@gluon.jit
def finish(
    one, other, bias, out, order, block, begin, end, expert, first, features,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    sums: gl.constexpr,
):  # fmt: skip
    """From sums to results, in their places. Those of a gate lie block by block, with zeros behind
    a block's pairs, as the next product has its tokens."""
    dtype: gl.constexpr = out.dtype.element_ty
    one *= _DIVISOR
    other *= _DIVISOR
    between = features if GATED else 64
    if BIASED:
        row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
        of_expert = bias + expert * (features * 2 if GATED else features)
        one += _row_values(of_expert, row, features)
        other += _row_values(of_expert + between, row, features - 64 * (0 if GATED else 1))
    if GATED:
        result = _join(one, other, dtype, GELU, CLAMPED, ALPHA, LIMIT)
        _store(result, out, order, block, begin, end, first, features, True, BLOCK, 64)
    else:
        _store(one.to(dtype), out, order, block, begin, end, first, features, False, BLOCK, 64)
        _store(
            other.to(dtype), out, order, block, begin, end, first + 64, features, False, BLOCK, 64
        )


@gluon.jit
def finish_halves(
    total, bias, out, order, block, begin, end, expert, first, features,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """The same of sums that have eight rows of one half and eight of the other in turn, 32 each;
    the second half is that of up, or begins 32 rows behind the first."""
    dtype: gl.constexpr = out.dtype.element_ty
    of_halves = gl.permute(gl.reshape(total * _DIVISOR, [4, 2, 8, BLOCK]), (0, 2, 3, 1))
    one, other = gl.split(of_halves)
    one, other = gl.reshape(one, [32, BLOCK]), gl.reshape(other, [32, BLOCK])
    between = features if GATED else 32
    if BIASED:
        row = first + gl.arange(0, 32, layout=gl.SliceLayout(1, one.type.layout))
        of_expert = bias + expert * (features * 2 if GATED else features)
        one += _row_values(of_expert, row, features)
        other += _row_values(of_expert + between, row, features - 32 * (0 if GATED else 1))
    if GATED:
        result = _join(one, other, dtype, GELU, CLAMPED, ALPHA, LIMIT)
        _store(result, out, order, block, begin, end, first, features, True, BLOCK, 32)
    else:
        _store(one.to(dtype), out, order, block, begin, end, first, features, False, BLOCK, 32)
        _store(
            other.to(dtype), out, order, block, begin, end, first + 32, features, False, BLOCK, 32
        )


@gluon.jit
def _row_values(of_expert, row, features):
    return gl.load(of_expert + row, mask=row < features, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _store(
    result, out, order, block, begin, end, first, features,
    BY_BLOCK: gl.constexpr,
    BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    lanes: gl.constexpr = ROWS // 8
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, 4], [0, 1])
    result = gl.convert_layout(result, memory)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, memory))
    of_block = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, memory))
    is_pair = begin + of_block < end
    if BY_BLOCK:
        target = block * BLOCK + of_block
    else:
        target = gl.load(order + begin + of_block, mask=is_pair, other=0)
    to = out + target.to(gl.int64)[None, :] * features + row[:, None]
    live = (row < features)[:, None]
    gl.store(to, result, mask=is_pair[None, :] & live)
    if BY_BLOCK:
        # Bias and gate made other numbers of zeros. To store is fewer instructions than to choose.
        zeros = gl.zeros([ROWS, BLOCK], out.dtype.element_ty, memory)
        gl.store(to, zeros, mask=~is_pair[None, :] & live)


@gluon.jit
def _join(
    gate,
    up,
    dtype: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    gate, up = _rounded(gate, up)
    if CLAMPED:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1.0
        result = gate / (1.0 + gl.exp(-ALPHA * gate)) * up
    else:
        x = gate
        if GELU:
            x = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)
        result = (gate / (1.0 + gl.exp(-x))).to(dtype).to(gl.float32) * up
    return result.to(dtype)


@gluon.jit
def _rounded(one, other):
    """To bfloat16 and back, both at once: to convert one alone is an instruction of the unit that
    finds exponentials, which is slow."""
    return gl.inline_asm_elementwise(
        _ROUND_BOTH, "=&r,=&r,r,r", [one, other], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
