"""Putting the parts of cut sequences together, each weighted by its share of the softmax."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.parts import Parts

_AT_ONCE = 64  # parts


def put_together(parts: Parts, batch: AttentionBatch, out: Tensor, early: bool) -> None:
    """Fill the rows of `out` whose sequences were cut; the others are there already.

    `early`: the kernel before this one lets it get ready, and it waits for that one's end.
    """
    heads, head_dim = out.shape[1:]
    _put_together[(heads, len(batch.query_lens))](
        parts.values,
        parts.shares,
        parts.owners,
        batch.query_starts,
        out,
        *out.stride()[:2],
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEAD_WIDTH=triton.next_power_of_2(head_dim),
        AT_ONCE=_AT_ONCE,
        EARLY=early,
        num_warps=2,
        **({"launch_pdl": True} if early else {}),
    )


@triton.jit
def _put_together(
    values,
    shares,
    owners,
    query_starts,
    out,
    out_row_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of one sequence, from all its parts; where there are several, none is empty."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    row = tl.load(query_starts + sequence)
    end = tl.load(query_starts + sequence + 1)
    first = tl.load(owners + sequence * 2)
    parts = tl.load(owners + sequence * 2 + 1)  # of sequences that are no decodes, anything
    if (end - row != 1) | (parts == 1):
        return
    dims = tl.arange(0, HEAD_WIDTH)
    dim_live = dims < HEAD_DIM
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_WIDTH], tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        place = (first + part) * HEADS + head
        share = tl.load(shares + place, mask=part < parts, other=float("-inf"))
        pointers = values + place[:, None] * HEAD_DIM + dims[None, :]
        mask = (part < parts)[:, None] & dim_live[None, :]
        value = tl.load(pointers, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(share, 0))
        weight = tl.exp2(share - new_top)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(value * weight[:, None], 0)
        top = new_top
    to = out + row.to(tl.int64) * out_row_stride + head * out_head_stride + dims
    tl.store(to, (acc / total).to(out.dtype.element_ty), mask=dim_live)
