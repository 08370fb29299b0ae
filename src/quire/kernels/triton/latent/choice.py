"""Which kernel of latent attention there is for what, and how large its programs are."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.triton.latent.shapes import (
    EXACT,
    HOPPER_FEW,
    HOPPER_PAIRS,
    LEAST_ROWS,
    MOST_ROWS,
    Shape,
)
from quire.kernels.triton.sizes import next_power_of_2
from quire.kernels.triton.tried import is_hopper, tried

_RANK, _ROPE = 512, 64  # the sizes that Hopper's kernels have


def shape_of(q: Tensor, pages: LatentPages, span: int) -> Shape:
    """For sequences of up to `span` new tokens, each with all heads of `q`."""
    rows = span * q.shape[1]
    if q.element_size() == 4:
        return EXACT
    is_fp8 = pages.scales is not None
    if not is_fp8 and has_hopper_kernel(q, pages):
        return next((shape for shape in HOPPER_FEW if rows <= shape.rows), HOPPER_PAIRS)
    rows = min(MOST_ROWS, max(LEAST_ROWS, next_power_of_2(rows)))
    return Shape(rows, 32, 8, 2, 1) if is_fp8 else Shape(rows, 64, 4, 2, 1)


def has_hopper_kernel(q: Tensor, pages: LatentPages) -> bool:
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and (pages.rank, pages.rope) == (_RANK, _ROPE)
        and is_hopper(q.device)
        and _can_be_built(q.device, q.dtype)
    )


@tried("Latent attention is")
def _can_be_built(device: torch.device, dtype: torch.dtype) -> None:
    """One token, of itself."""
    from quire.kernels.triton.attention.kv_splits import KVSplits
    from quire.kernels.triton.latent import hopper_few, hopper_pairs

    def numbers(*listed: int) -> Tensor:
        return torch.tensor(listed, dtype=torch.int32, device=device)

    q = torch.zeros(1, HOPPER_PAIRS.rows, _RANK + _ROPE, dtype=dtype, device=device)
    pages = LatentPages.of(q.new_zeros(1, 16, _RANK + _ROPE), _RANK)
    batch = AttentionBatch(
        numbers(0).long(), numbers(0).view(1, 1), numbers(0, 1), numbers(1), [1], [1]
    )
    nothing = q.new_empty(0, dtype=torch.float32)
    table = numbers(0, 0, 0, 1, 1, 1, 0, 0).view(1, 8)
    splits = KVSplits(1, 1, table, nothing, nothing, nothing)
    out = q.new_empty(1, HOPPER_PAIRS.rows, _RANK)
    hopper_pairs.attend(q, pages, batch, splits, 1.0, out)
    hopper_few.attend(q, pages, batch, splits, 1.0, out, HOPPER_FEW[0].rows)
