"""From sums of `hopper_fours.py` to results, in their places. What is joined how is said in
`gating.py`, whose functions are Triton's; these are Gluon's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.experts import unpack

_DIVISOR: gl.constexpr = gl.constexpr(unpack.DIVISOR.value)


@gluon.jit
def finish(
    one, other, bias, out, order, begin, end, expert, first, features,
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
        _store(result, out, order, begin, end, first, features, True, BLOCK)
    else:
        _store(one.to(dtype), out, order, begin, end, first, features, False, BLOCK)
        _store(other.to(dtype), out, order, begin, end, first + 64, features, False, BLOCK)


@gluon.jit
def _row_values(of_expert, row, features):
    return gl.load(of_expert + row, mask=row < features, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _store(
    result, out, order, begin, end, first, features, BY_EXPERT: gl.constexpr, BLOCK: gl.constexpr
):
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(result, memory)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, memory))
    place = begin + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, memory))
    is_pair = place < end
    target = place
    if not BY_EXPERT:
        target = gl.load(order + place, mask=is_pair, other=0)
    to = out + target.to(gl.int64)[None, :] * features + row[:, None]
    gl.store(to, result, mask=is_pair[None, :] & (row < features)[:, None])


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
