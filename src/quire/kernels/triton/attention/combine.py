"""Putting the parts of cut sequences together, each weighted by its share of the softmax.

Most sequences are not cut, and a program that finds nothing to do costs time as well. So there are
as many programs as keep a GPU busy, and they go over the rows of the sequences that are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.attention.kv_splits import Parts
from quire.kernels.triton.pdl import await_last

_AT_ONCE = 64  # parts
_PROGRAMS_PER_PROCESSOR = 8


def put_together(
    parts: Parts, batch: AttentionBatch, out: Tensor, processors: int, early: dict[str, bool]
) -> None:
    """Fill the rows of `out` whose sequences were cut; the others are there already.

    `early`: the kernel before this one lets it get ready, and it waits for that one's end.
    """
    heads, head_dim = out.shape[1:]
    most = len(batch.query_lens) * parts.span * heads
    _put_together[(min(most, processors * _PROGRAMS_PER_PROCESSOR),)](
        parts.values,
        parts.shares,
        parts.cut,
        out,
        *out.stride()[:2],
        SPAN=parts.span,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEAD_WIDTH=triton.next_power_of_2(head_dim),
        AT_ONCE=_AT_ONCE,
        num_warps=2,
        **early,
    )


@triton.jit
def _put_together(
    values,
    shares,
    cut,
    out,
    out_row_stride,
    out_head_stride,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some heads of some tokens, one after the other. Of the first parts, no token misses more than
    one, which its window has left behind; of the last, those behind it."""
    dims = tl.arange(0, HEAD_WIDTH)
    dim_live = dims < HEAD_DIM
    # What is cut was written before the kernel that this one waits for began.
    end = tl.load(cut) * (SPAN * HEADS)
    slot = tl.program_id(0)
    row, length, first, parts = _sequence(cut, slot // (SPAN * HEADS), slot < end)
    await_last(EARLY)
    for slot in range(tl.program_id(0), end, tl.num_programs(0)):
        token = slot // HEADS % SPAN
        head = slot % HEADS
        if token < length:
            top = float("-inf")
            total = 0.0
            acc = tl.zeros([HEAD_WIDTH], tl.float32)
            for start in range(0, parts, AT_ONCE):
                part = start + tl.arange(0, AT_ONCE)
                place = ((first + part) * SPAN + token) * HEADS + head
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
            to = out + (row + token).to(tl.int64) * out_row_stride + head * out_head_stride
            tl.store(to + dims, (acc / total).to(out.dtype.element_ty), mask=dim_live)
        following = slot + tl.num_programs(0)
        row, length, first, parts = _sequence(cut, following // (SPAN * HEADS), following < end)


@triton.jit
def _sequence(cut, number, live):
    """The first row of a cut sequence, how many it has, its first part, and how many these are."""
    field = cut + (1 + number) * 4
    row = tl.load(field, mask=live, other=0)
    length = tl.load(field + 1, mask=live, other=0)
    first = tl.load(field + 2, mask=live, other=0)
    parts = tl.load(field + 3, mask=live, other=0)
    return row, length, first, parts
