"""Adds what programs found that shared the columns of a product (`many.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import cdiv

_WIDTH = 16  # rows of x for a program


def combine(
    partial: Tensor, splits: int, first: int, across: int, bias: Tensor | None, out: Tensor
) -> None:
    """`partial` `[tiles * splits, features, height]`: those of tile `first`, then of the next.

    Tiles go over all `across` of x's rows, then on to the next features.
    """
    _, features, height = partial.shape
    tiles = len(partial) // splits
    _combine[(tiles, cdiv(height, _WIDTH))](
        partial,
        out if bias is None else bias,
        out,
        first,
        across,
        splits,
        *out.shape,
        out.stride(0),
        FEATURES=features,
        HEIGHT=height,
        WIDTH=_WIDTH,
        BIASED=bias is not None,
    )


@triton.jit(do_not_specialize=["first", "across", "splits", "rows"])
def _combine(
    partial,
    bias,
    out,
    first,
    across,
    splits,
    rows,
    columns,
    out_stride,
    FEATURES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    number = tl.program_id(0)
    tile = first + number
    start = tile % across * HEIGHT
    within = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    feature = tl.arange(0, FEATURES)
    source = partial + number.to(tl.int64) * (splits * FEATURES * HEIGHT)
    source += feature[:, None] * HEIGHT + within[None, :]
    live = (start + within < rows)[None, :]
    total = tl.zeros((FEATURES, WIDTH), tl.float32)
    for _ in range(splits):
        total += tl.load(source, mask=live, other=0.0)
        source += FEATURES * HEIGHT
    column = tile // across * FEATURES + feature
    live &= (column < columns)[:, None]
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    target = out + (start + within).to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=live)
