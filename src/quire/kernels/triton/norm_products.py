"""A norm of one or two rows and a small product of it, such as a router's, in one launch.

Each program normalises the whole row and multiplies it by one row of the matrix: what it does twice
takes less time than a second launch. None of them may write to the stream, which all of them read:
whatever was to be added to it has been.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.gemv import is_few
from quire.kernels.triton.norm import normalise
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import next_power_of_2

_MOST = 256  # programs of a row: with more, too much is done twice


def norm_products(
    stream: Tensor,
    weight: Tensor,
    eps: float,
    matrix: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    """`stream` `[tokens, hidden]` normalised, and the products of that in `dtype`; None: two
    launches are better."""
    (rows, hidden), features = stream.shape, len(matrix)
    if not is_few(stream, matrix) or features > _MOST:
        return None
    out = torch.empty((rows, hidden), dtype=stream.dtype, device=stream.device)
    products = torch.empty((rows, features), dtype=dtype, device=stream.device)
    width = next_power_of_2(hidden)
    _norm_products[(features, rows)](
        stream,
        weight,
        matrix,
        matrix if bias is None else bias,
        out,
        products,
        eps,
        stream.stride(0),
        HIDDEN=hidden,
        WIDTH=width,
        BIASED=bias is not None,
        num_warps=max(1, min(8, width // 512)),
        **pdl_launch(stream.device),
    )
    return out, products


@triton.jit
def _norm_products(
    stream,
    weight,
    matrix,
    bias,
    out,
    products,
    eps,
    stream_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = stream.dtype.element_ty
    feature, row = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    live = lane < HIDDEN
    scale = tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)
    factors = tl.load(matrix + feature * HIDDEN + lane, mask=live, other=0.0)
    added = 0.0
    if BIASED:
        added = tl.load(bias + feature).to(tl.float32)
    trigger_then_wait(PDL)
    x = tl.load(stream + row * stream_stride + lane, mask=live, other=0.0).to(tl.float32)
    normed = normalise(x, scale, eps, HIDDEN, dtype, weight.dtype.element_ty == dtype)
    if feature == 0:
        tl.store(out + row * HIDDEN + lane, normed, mask=live)
    product = tl.sum(normed.to(tl.float32) * factors.to(tl.float32), 0) + added
    to = products + row * tl.num_programs(0) + feature
    tl.store(to, product.to(products.dtype.element_ty))
