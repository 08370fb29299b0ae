"""What becomes of the sums of a product of codes: scaled, rounded, written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_scaled(
    sums,
    x_scales,
    scales,
    bias,
    out,
    row,
    feature,
    rows,
    features,
    GROUPED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """`row` and `feature` lie as those of `sums` do, one down and the other across.

    GROUPED: the sums are scaled already.
    """
    result = sums.to(tl.float32)
    row_live, feature_live = row < rows, feature < features
    if not GROUPED:
        result *= tl.load(x_scales + row, mask=row_live, other=0.0) * tl.load(
            scales + feature, mask=feature_live, other=0.0
        )
    if BIASED:
        result += tl.load(bias + feature, mask=feature_live, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * features + feature
    tl.store(out + place, result.to(out.dtype.element_ty), mask=row_live & feature_live)
