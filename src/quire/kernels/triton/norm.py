"""The residual stream: adding what a block computed, and normalising the sum, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.codes import CodeFormat, Codes
from quire.kernels.triton.codes.quantise import room_for, write_codes
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import next_power_of_2


def add_rms_norm(stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """One program for each row of `stream` `[tokens, hidden]`, which holds the sum afterwards."""
    rows, hidden = stream.shape
    out = torch.empty((rows, hidden), dtype=stream.dtype, device=stream.device)
    _launch(stream, delta, weight, eps, out, None, None)
    return out


def quantised_norm(
    stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: CodeFormat
) -> Codes:
    """The same, whose result is rounded and then quantised."""
    out = room_for(len(stream), stream.shape[1], form, stream)
    _launch(stream, delta, weight, eps, out.values, out.scales, form)
    return out


def _launch(
    stream: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scales: Tensor | None,
    form: CodeFormat | None,
) -> None:
    rows, hidden = stream.shape
    if rows == 0:
        return
    if delta is not None:
        delta = delta.contiguous()
    width = next_power_of_2(hidden)
    _add_rms_norm[(rows,)](
        stream,
        stream if delta is None else delta,
        weight,
        out,
        out if scales is None else scales,
        eps,
        stream.stride(0),
        rows,
        HIDDEN=hidden,
        WIDTH=width,
        ADD=delta is not None,
        GROUP=0 if form is None else form.group or width,
        num_warps=max(1, min(8, width // 512)),
        **pdl_launch(stream.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    stream,
    delta,
    weight,
    out,
    scales,
    eps,
    stream_stride,
    rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = stream.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    live = lane < HIDDEN
    scale = tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)
    trigger_then_wait(PDL)
    x = tl.load(stream + row * stream_stride + lane, mask=live, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row * HIDDEN + lane, mask=live, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(stream + row * stream_stride + lane, total, mask=live)
        x = total.to(tl.float32)
    normed = normalise(x, scale, eps, HIDDEN, dtype, weight.dtype.element_ty == dtype)
    if GROUP > 0:
        write_codes(normed, out, scales, row, rows, 0, HIDDEN, WIDTH, GROUP)
    else:
        tl.store(out + row * HIDDEN + lane, normed, mask=live)


@triton.jit
def normalise(x, scale, eps, HIDDEN: tl.constexpr, dtype: tl.constexpr, IS_ROUNDED: tl.constexpr):
    """A row of float32 in `dtype`, weighted by `scale`: rounded before that as well, as models were
    trained, but for those with float32 weights."""
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    if IS_ROUNDED:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * scale).to(dtype)
