"""A linear layer for one or two rows, and the gate of an MLP with it: as fast as weights are read.

With few rows a product is nothing but reading the matrix once. A program multiplies a few of its
rows, all columns of them: no partial sums have to meet in a second kernel. While one tile is
multiplied, the next is on its way; the first is asked for before the kernel ahead is done
(`pdl.py`), so that the memory is never idle between layers.

For a gate, a program takes the same rows of both halves, and only `activation(gate) * up` is
written.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.triton.act_and_mul import activate
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

_ROWS = 2  # of x, at most: with more of them, tensor cores are faster
WARPS = 4
VECTOR = 8  # weights that a thread reads at once, 16 bytes
TILE = WARPS * 32 * VECTOR  # columns: each thread has one vector of each row
# Rows of the matrix that a program takes, and how many such programs a multiprocessor runs well
# at once: about what it has registers for.
_SIZES = {1: 16, 2: 11, 4: 8, 8: 7}
_MANY_WAVES = 4  # the size where programs follow one another anyway


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemv` is the faster way: few rows, and of a type that loses nothing in float32."""
    return (
        0 < x.shape[0] <= _ROWS
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.dtype == x.dtype
        and x.stride(1) == 1
        and weight.is_contiguous()
    )


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None = None,
    dtype: torch.dtype | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """`F.linear(x, weight, bias)` where `is_few`; with an activation, `act_and_mul` of that.
    `dtype` is that of the result, if it is to be another than that of `x`. The result is a new
    tensor, or what it was added to, which is contiguous."""
    gated = activation is not None
    rows, columns = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = add_to
    if out is None:
        out = torch.empty((rows, features), dtype=dtype or x.dtype, device=x.device)
    together = features_together(features, gated, x.device)
    _gemv[(cdiv(features, together),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        features,
        columns,
        ROWS=rows,
        TOGETHER=together,
        TILE=TILE,
        VECTOR=VECTOR,
        GATED=gated,
        GELU=activation is Activation.GELU_TANH,
        BIASED=bias is not None,
        ADDS=add_to is not None,
        num_warps=WARPS,
        **pdl_launch(x.device),
    )
    return out


@memoise
def features_together(features: int, gated: bool, device: torch.device) -> int:
    """Features for each program: as few as let all programs run at once.

    A second wave that is not full would leave much of the device idle.
    """
    there_are = processors(device, interpreted=1)
    halves = 2 if gated else 1
    for size, at_once in _SIZES.items():
        if size >= halves and cdiv(features * halves, size) <= there_are * at_once:
            return size // halves
    return _MANY_WAVES // halves


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    out,
    x_stride,
    features,
    columns,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * TOGETHER
    multiply_rows(
        first,
        x,
        weight,
        bias,
        out,
        x_stride,
        features,
        columns,
        ROWS,
        TOGETHER,
        TILE,
        VECTOR,
        GATED,
        GELU,
        BIASED,
        ADDS,
        PDL,
    )


@triton.jit
def multiply_rows(
    first,
    x,
    weight,
    bias,
    out,
    x_stride,
    features,
    columns,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What one program does: `TOGETHER` features from the `first` on, of all rows of `x`."""
    halves: tl.constexpr = 2 if GATED else 1
    # A gate's rows alternate: gate, up, gate, up.
    which = tl.arange(0, TOGETHER * halves)
    feature = first + which // halves
    live = feature < features
    row = feature + (which % halves) * features
    lane = tl.arange(0, TILE)
    source = weight + row.to(tl.int64)[:, None] * columns + lane[None, :]
    tile = load_once(source, live, lane < columns)
    added = load_bias(bias, row, live, BIASED)
    trigger_then_wait(PDL)

    last = features - first
    there = load_there(out + first, last, TOGETHER, ADDS)
    if ROWS > 1:
        more_there = load_there(out + features + first, last, TOGETHER, ADDS)
    sums = tl.zeros((TOGETHER * halves, TILE // VECTOR), tl.float32)
    more_sums = sums
    for start in range(0, columns, TILE):
        column = start + lane
        next_tile = load_once(source + (start + TILE), live, column + TILE < columns)
        values = tl.load(x + column, mask=column < columns, other=0.0)
        sums += multiply_tile(tile, values, VECTOR)
        if ROWS > 1:
            values = tl.load(x + x_stride + column, mask=column < columns, other=0.0)
            more_sums += multiply_tile(tile, values, VECTOR)
        tile = next_tile

    result = tl.sum(sums, 1) + added
    finish(result, out + first, last, TOGETHER, GATED, GELU, there, ADDS)
    if ROWS > 1:
        result, to = tl.sum(more_sums, 1) + added, out + features + first
        finish(result, to, last, TOGETHER, GATED, GELU, more_there, ADDS)


@triton.jit
def load_once(source, rows_live, columns_live):
    """Weights are read once: they leave the cache first."""
    mask = rows_live[:, None] & columns_live[None, :]
    return tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def multiply_tile(tile, values, VECTOR: tl.constexpr):
    """The sums over each thread's own columns; threads meet only at the end."""
    products = tile.to(tl.float32) * values.to(tl.float32)[None, :]
    rows: tl.constexpr = tile.shape[0]
    return tl.sum(tl.reshape(products, (rows, tile.shape[1] // VECTOR, VECTOR)), 2)


@triton.jit
def load_bias(bias, row, live, BIASED: tl.constexpr):
    """What is added to sums, which is not to be waited for once they are there."""
    added = tl.zeros(row.shape, tl.float32)
    if BIASED:
        added = tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
    return added


@triton.jit
def load_there(out, features, TOGETHER: tl.constexpr, ADDS: tl.constexpr):
    """What results are added to, which is not to be waited for once they are there, either."""
    there = tl.zeros((TOGETHER,), tl.float32)
    if ADDS:
        lane = tl.arange(0, TOGETHER)
        there = tl.load(out + lane, mask=lane < features, other=0.0).to(tl.float32)
    return there


@triton.jit
def finish(
    result,
    out,
    features,
    TOGETHER: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    there=0.0,
    ADDS: tl.constexpr = False,
):
    """Apply the gate, and write up to `features` of one row of `x`, or add them to what is
    there."""
    dtype: tl.constexpr = out.dtype.element_ty
    result = result.to(dtype)
    if GATED:
        gate, up = tl.split(tl.reshape(result.to(tl.float32), (TOGETHER, 2)))
        # Rounded before it is multiplied, as models were trained.
        result = (activate(gate, GELU).to(dtype).to(tl.float32) * up).to(dtype)
    lane = tl.arange(0, TOGETHER)
    if ADDS:
        result = (result.to(tl.float32) + there).to(dtype)
    tl.store(out + lane, result, mask=lane < features)
