"""Combines the KV splits of each sequence, as in Flash-Decoding: weighted by their log-sum-exps.

Most sequences have one split, and a program that finds nothing to do costs time as well. So there
are as many programs as keep a GPU busy, and they go over the rows of the sequences with several.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.attention.kv_splits import KVSplits
from quire.kernels.triton.attention.softmax import add_sink
from quire.kernels.triton.pdl import wait_for_previous, wait_then_trigger
from quire.kernels.triton.sizes import next_power_of_2

_AT_ONCE = 64  # splits …
_AT_ONCE_WIDE = 16  # … of heads above 256, such as latents: so many fit into registers …
_AT_ONCE_WIDE_OF_MANY = 8  # … and so many where all rows' programs should start at once
_PROGRAMS_PER_PROCESSOR = 8
_WARPS, _WARPS_WIDE = 2, 4


def combine_splits(
    splits: KVSplits,
    batch: AttentionBatch,
    sinks: Tensor | None,
    out: Tensor,
    processors: int,
    pdl: dict[str, bool],
    trigger: bool = False,
) -> None:
    """Fill the rows of `out` whose sequences are in several splits; the others are there already.

    `pdl`: how to launch it before the kernel ahead has ended, which it then waits for. With
    `trigger`, and where its programs are few, the next kernel may start before it has ended.
    """
    heads, head_dim = out.shape[1:]
    most = len(batch.query_lens) * splits.span * heads
    _combine_splits[(min(most, processors * _PROGRAMS_PER_PROCESSOR),)](
        splits.values,
        splits.lse,
        splits.split_sequences,
        out if sinks is None else sinks,
        out,
        *out.stride()[:2],
        SPAN=splits.span,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEAD_WIDTH=next_power_of_2(head_dim),
        AT_ONCE=_AT_ONCE if head_dim <= 256 else _wide_at_once(most, processors),
        SINKS=sinks is not None,
        TRIGGERS=trigger or most <= processors,
        num_warps=_WARPS if head_dim <= 256 else _WARPS_WIDE,
        **pdl,
    )


def _wide_at_once(rows: int, processors: int) -> int:
    return _AT_ONCE_WIDE if rows <= 4 * processors else _AT_ONCE_WIDE_OF_MANY


@triton.jit
def _combine_splits(
    values,
    lse,
    split_sequences,
    sinks,
    out,
    out_row_stride,
    out_head_stride,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of some tokens, one after the other. A token misses at most one of the first
    splits, which lies before its window, and those of the last that lie behind it.

    TRIGGERS: the next kernel may start beside this one's programs."""
    dims = tl.arange(0, HEAD_WIDTH)
    dim_live = dims < HEAD_DIM
    # `split_sequences` was written before the kernel that this one waits for began.
    end = tl.load(split_sequences) * (SPAN * HEADS)
    slot = tl.program_id(0)
    row, length, first, num_splits = _sequence(split_sequences, slot // (SPAN * HEADS), slot < end)
    if TRIGGERS:
        wait_then_trigger(PDL)
    else:
        wait_for_previous(PDL)
    for slot in range(tl.program_id(0), end, tl.num_programs(0)):
        token = slot // HEADS % SPAN
        head = slot % HEADS
        if token < length:
            top = float("-inf")
            total = 0.0
            acc = tl.zeros([HEAD_WIDTH], tl.float32)
            for start in range(0, num_splits, AT_ONCE):
                split = start + tl.arange(0, AT_ONCE)
                place = ((first + split) * SPAN + token) * HEADS + head
                split_lse = tl.load(lse + place, mask=split < num_splits, other=float("-inf"))
                pointers = values + place[:, None] * HEAD_DIM + dims[None, :]
                mask = (split < num_splits)[:, None] & dim_live[None, :]
                value = tl.load(pointers, mask=mask, other=0.0)
                new_top = tl.maximum(top, tl.max(split_lse, 0))
                weight = tl.exp2(split_lse - new_top)
                fade = tl.exp2(top - new_top)
                total = total * fade + tl.sum(weight, 0)
                acc = acc * fade + tl.sum(value * weight[:, None], 0)
                top = new_top
            if SINKS:
                total = add_sink(total, top, tl.load(sinks + head))
            to = out + (row + token).to(tl.int64) * out_row_stride + head * out_head_stride
            tl.store(to + dims, (acc / total).to(out.dtype.element_ty), mask=dim_live)
        following = slot + tl.num_programs(0)
        row, length, first, num_splits = _sequence(
            split_sequences, following // (SPAN * HEADS), following < end
        )


@triton.jit
def _sequence(split_sequences, number, live):
    """The first row of a sequence, its new tokens, its first split, and how many splits it has."""
    field = split_sequences + (1 + number) * 4
    row = tl.load(field, mask=live, other=0)
    length = tl.load(field + 1, mask=live, other=0)
    first = tl.load(field + 2, mask=live, other=0)
    num_splits = tl.load(field + 3, mask=live, other=0)
    return row, length, first, num_splits
