"""The products of `kv_b_proj` with few tokens: as fast as a head's part of it is read.

In the order of a library's batched product these would be two launches that start late and keep
the next one from starting early (`pdl.py`). A program has some columns of a head's K rows, or some
of its V rows, which it asks for while the kernel ahead ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_FEW = 2  # tokens, each of which reads the matrix for itself
_COLUMNS = 64  # of a head's K rows that a program has: every processor has some with 16 heads
_ROWS = 16  # of V


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels are the faster way, for `x` `[tokens, heads, …]`."""
    return (
        0 < x.shape[0] <= _FEW
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.dtype == x.dtype
        and x.stride(2) == weight.stride(2) == 1
    )


def absorb(q: Tensor, rows: Tensor, out: Tensor) -> None:
    """`q` `[tokens, heads, nope]` by `rows` `[heads, nope, rank]`, to `out` `[…, rank]`."""
    heads, nope, rank = rows.shape
    _absorb[(heads, cdiv(rank, _COLUMNS), len(q))](
        q,
        rows,
        out,
        *q.stride()[:2],
        *rows.stride()[:2],
        *out.stride()[:2],
        NOPE=nope,
        NOPE_WIDTH=next_power_of_2(nope),
        RANK=rank,
        COLUMNS=_COLUMNS,
        **pdl_launch(q.device),
    )


def values_of(sums: Tensor, rows: Tensor) -> Tensor:
    """`sums` `[tokens, heads, rank]` by `rows` `[heads, values, rank]`: `[…, values]`."""
    heads, values, rank = rows.shape
    out = torch.empty((len(sums), heads, values), dtype=sums.dtype, device=sums.device)
    _values_of[(heads, cdiv(values, _ROWS), len(sums))](
        sums,
        rows,
        out,
        *sums.stride()[:2],
        *rows.stride()[:2],
        *out.stride()[:2],
        VALUES=values,
        RANK=rank,
        RANK_WIDTH=next_power_of_2(rank),
        ROWS=_ROWS,
        **pdl_launch(sums.device),
    )
    return out


@triton.jit
def _absorb(
    q,
    rows,
    out,
    q_stride,
    q_head_stride,
    head_stride,
    row_stride,
    out_stride,
    out_head_stride,
    NOPE: tl.constexpr,
    NOPE_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    head, token = tl.program_id(0), tl.program_id(2)
    row = tl.arange(0, NOPE_WIDTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = rows + head * head_stride + row[:, None] * row_stride + column[None, :]
    mask = (row < NOPE)[:, None] & (column < RANK)[None, :]
    tile = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")
    trigger_then_wait(PDL)
    inputs = q + token * q_stride + head * q_head_stride + row
    values = tl.load(inputs, mask=row < NOPE, other=0.0).to(tl.float32)
    found = tl.sum(tile.to(tl.float32) * values[:, None], 0)
    to = out + token * out_stride + head * out_head_stride + column
    tl.store(to, found.to(dtype), mask=column < RANK)


@triton.jit
def _values_of(
    sums,
    rows,
    out,
    sums_stride,
    sums_head_stride,
    head_stride,
    row_stride,
    out_stride,
    out_head_stride,
    VALUES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    head, token = tl.program_id(0), tl.program_id(2)
    value = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, RANK_WIDTH)
    source = rows + head * head_stride + value[:, None] * row_stride + lane[None, :]
    mask = (value < VALUES)[:, None] & (lane < RANK)[None, :]
    tile = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")
    trigger_then_wait(PDL)
    inputs = sums + token * sums_stride + head * sums_head_stride + lane
    latent = tl.load(inputs, mask=lane < RANK, other=0.0).to(tl.float32)
    found = tl.sum(tile.to(tl.float32) * latent[None, :], 1)
    to = out + token * out_stride + head * out_head_stride + value
    tl.store(to, found.to(dtype), mask=value < VALUES)
