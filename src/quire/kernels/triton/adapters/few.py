"""A linear layer for one or two rows with adapters: `a x` comes from the same launch.

Beside the programs that multiply rows of the matrix (`gemv.py`), others multiply rows of the slots'
`a`: a percent more of them, so the launch hardly takes longer. What follows is a launch of
`expand`, whose reads begin before this one is done: a layer costs one small launch more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.triton.adapters.ranks import TABLES
from quire.kernels.triton.gemv import TILE, VECTOR, WARPS, features_together, multiply_rows
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.sizes import cdiv


def gemv_and_shrink(
    x: Tensor, weight: Tensor, bias: Tensor | None, slots: AdapterSlots, batch: AdapterBatch
) -> tuple[Tensor, Tensor]:
    """`F.linear(x, weight, bias)` where `gemv.is_few`, and what `shrink` finds."""
    rows, columns = x.shape
    features, ranks = weight.shape[0], slots.a.shape[1]
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    hidden = torch.empty((1, rows, ranks), dtype=torch.float32, device=x.device)
    size = features_together(features + rows * ranks, False, x.device)
    shrinking = cdiv(ranks, size)  # programs for each row
    _gemv_and_shrink[(rows * shrinking + cdiv(features, size),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        slots.a,
        slots.starts,
        batch.slots,
        hidden,
        x.stride(0),
        slots.starts.stride(0),
        features,
        columns,
        ranks,
        shrinking,
        OUTPUTS=len(slots.sizes),
        ROWS=rows,
        TOGETHER=size,
        TILE=TILE,
        VECTOR=VECTOR,
        BIASED=bias is not None,
        num_warps=WARPS,
        **pdl_launch(x.device),
    )
    return out, hidden


@triton.jit(do_not_specialize=["shrinking"], do_not_specialize_on_alignment=TABLES)
def _gemv_and_shrink(
    x,
    weight,
    bias,
    out,
    a,
    starts,
    slots,
    hidden,
    x_stride,
    starts_stride,
    features,
    columns,
    ranks,
    shrinking,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if program < ROWS * shrinking:
        row, first = program // shrinking, program % shrinking * TOGETHER
        slot = tl.load(slots + row).to(tl.int64)
        used = tl.load(starts + slot * starts_stride + OUTPUTS, mask=slot >= 0, other=0)
        if first < used:
            multiply_rows(
                first,
                x + row * x_stride,
                a + slot * ranks * columns,
                bias,
                hidden + row * ranks,
                x_stride,
                used,
                columns,
                1,
                TOGETHER,
                TILE,
                VECTOR,
                False,
                False,
                False,
                False,
                PDL,
            )
    else:
        multiply_rows(
            (program - ROWS * shrinking) * TOGETHER,
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
            False,
            False,
            BIASED,
            False,
            PDL,
        )
