"""The residual stream: adding what a block computed, and normalising the sum, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait


def add_rms_norm(stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """One program for each row of `stream` `[tokens, hidden]`, which holds the sum afterwards."""
    rows, hidden = stream.shape
    out = torch.empty((rows, hidden), dtype=stream.dtype, device=stream.device)
    if rows == 0:
        return out
    if delta is not None:
        delta = delta.contiguous()
    width = triton.next_power_of_2(hidden)
    _add_rms_norm[(rows,)](
        stream,
        stream if delta is None else delta,
        weight,
        out,
        eps,
        stream.stride(0),
        HIDDEN=hidden,
        WIDTH=width,
        ADD=delta is not None,
        num_warps=max(1, min(8, width // 512)),
        **pdl_launch(stream.device),
    )
    return out


@triton.jit
def _add_rms_norm(
    stream,
    delta,
    weight,
    out,
    eps,
    stream_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    live = lane < HIDDEN
    scale = tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)
    trigger_then_wait(PDL)
    x = tl.load(stream + row * stream_stride + lane, mask=live, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row * HIDDEN + lane, mask=live, other=0.0).to(tl.float32)
        total = x.to(stream.dtype.element_ty)
        tl.store(stream + row * stream_stride + lane, total, mask=live)
        x = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    normed = x * factor
    if weight.dtype.element_ty == out.dtype.element_ty:
        # Rounded before it is weighted, as models were trained; not so those with float32 weights.
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * HIDDEN + lane, (normed * scale).to(out.dtype.element_ty), mask=live)
