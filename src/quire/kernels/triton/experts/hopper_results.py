"""From sums of `hopper_fours.py` to results, in their places. What is joined how is said in
`gating.py`, whose functions are Triton's; these are Gluon's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.experts import unpack

_DIVISOR: gl.constexpr = gl.constexpr(unpack.DIVISOR.value)


@gluon.jit
def finish(
    one, other, bias, out, order, begin, end, expert, first, features, out_quarter,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    sums: gl.constexpr,
):  # fmt: skip
    """From sums to results, in their places."""
    dtype: gl.constexpr = out.dtype.element_ty
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    one *= _DIVISOR
    other *= _DIVISOR
    if BIASED:
        of_expert = bias + expert * (features * 2 if GATED else features)
        second = row if GATED else row + 128
        one += _row_values(of_expert, row, features)
        other += _row_values(of_expert + (features if GATED else 0), second, features)
    if GATED:
        result = _join(one, other, dtype, GELU, CLAMPED, ALPHA, LIMIT)
        result = gl.where((row < features)[:, None], result, 0.0)
        _store(result, out, order, begin, end, first, out_quarter, True, BLOCK)
    else:
        _store(one.to(dtype), out, order, begin, end, first, features, False, BLOCK)
        _store(other.to(dtype), out, order, begin, end, first + 128, features, False, BLOCK)


@gluon.jit
def _row_values(of_expert, row, features):
    return gl.load(of_expert + row, mask=row < features, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _store(result, out, order, begin, end, first, size, BY_STEP: gl.constexpr, BLOCK: gl.constexpr):
    """To columns in the order of steps, of a quarter's `size`; or to rows token by token."""
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(result, memory)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, memory))
    place = begin + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, memory))
    is_pair = place < end
    if BY_STEP:
        group, steps = row // 32, size // 32
        column = group % steps * 128 + group // steps * 32 + row % 32
        to = out + place.to(gl.int64)[None, :] * (4 * size) + column[:, None]
        gl.store(to, result, mask=is_pair[None, :] & (row < 4 * size)[:, None])
    else:
        target = gl.load(order + place, mask=is_pair, other=0)
        to = out + target.to(gl.int64)[None, :] * size + row[:, None]
        gl.store(to, result, mask=is_pair[None, :] & (row < size)[:, None])


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
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
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
