"""Latent attention of sequences with few new tokens: split-KV, as `attention/decode.py` has it.

One program takes one split of one sequence's tokens for some rows: new tokens with each head, row r
being token r // heads, head r % heads. On a Hopper GPU 64 rows and more have a kernel of their own
(`hopper.py`, `hopper_pairs.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.triton.attention.combine import combine_splits
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits, split_kv
from quire.kernels.triton.attention.softmax import LOG2_E
from quire.kernels.triton.latent.choice import shape_of
from quire.kernels.triton.latent.shapes import HOPPER_PAIRS, Shape
from quire.kernels.triton.latent.walk import average, load_queries, walk
from quire.kernels.triton.latent.write import page_strides
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv, next_power_of_2


def split_latents(batch: AttentionBatch, q: Tensor, pages: LatentPages, span: int) -> KVSplits:
    """What `decode_latents` works by; the same for all layers."""
    shape, heads = shape_of(q, pages, span), q.shape[1]
    programs = processors(q.device) * shape.programs
    return split_kv(batch, q, pages.rank, programs, shape.tile, heads, shape.rows, None, span)


def decode_latents(
    q: Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scale: float,
    out: Tensor,
) -> None:
    """Fill the rows of `out` of sequences with no more new tokens than `splits` span."""
    attend(q, pages, batch, splits, scale, out)
    combine_splits(
        splits, batch, None, out, processors(q.device), pdl_launch(q.device), trigger=True
    )


def attend(
    q: Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scale: float,
    out: Tensor,
) -> None:
    """What is listed in `splits`; what is alone in its sequence goes to `out` at once."""
    shape = shape_of(q, pages, splits.span)
    if shape.for_hopper:
        _attend_on_hopper(q, pages, batch, splits, scale * LOG2_E, out, shape)
        return
    _attend[(cdiv(splits.span * q.shape[1], shape.rows), splits.count)](
        q,
        out,
        splits.table,
        splits.values,
        splits.lse,
        batch.block_tables,
        pages.latents,
        pages.rotated,
        pages.latents if pages.scales is None else pages.scales,
        scale * LOG2_E,
        *q.stride()[:2],
        *out.stride()[:2],
        *page_strides(pages),
        batch.block_tables.stride(0),
        HEADS=q.shape[1],
        SPAN=splits.span,
        ROWS=shape.rows,
        **widths(pages),
        BLOCK_SIZE=pages.block_size,
        TILE=shape.tile,
        SCALED=pages.scales is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **pdl_launch(q.device),
    )


def _attend_on_hopper(
    q: Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scale: float,
    out: Tensor,
    shape: Shape,
) -> None:
    from quire.kernels.triton.latent import hopper_few, hopper_pairs

    if shape == HOPPER_PAIRS:
        hopper_pairs.attend(q, pages, batch, splits, scale, out)
    else:
        hopper_few.attend(q, pages, batch, splits, scale, out, shape.rows)


def widths(pages: LatentPages) -> dict[str, int]:
    """Sizes of a latent's two parts, and as tensor cores take them: powers of two, 16 at least."""
    padded = [max(16, next_power_of_2(size)) for size in (pages.rank, pages.rope)]
    return {
        "RANK": pages.rank,
        "RANK_WIDTH": padded[0],
        "ROPE": pages.rope,
        "ROPE_WIDTH": padded[1],
    }


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    q,
    out,
    splits_table,
    values,
    lse,
    block_tables,
    latents,
    rotated,
    scales,
    scale,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    block_stride,
    slot_stride,
    rope_block_stride,
    rope_slot_stride,
    scale_block_stride,
    scale_slot_stride,
    table_stride,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_then_trigger(PDL)
    item = tl.program_id(1)
    field = splits_table + item * FIELDS
    # All at once, before the first is looked at: waiting for one after the other takes longer.
    sequence = tl.load(field).to(tl.int64)
    row = tl.load(field + 1).to(tl.int64)
    first = tl.load(field + 2)
    end = tl.load(field + 3)
    num_splits = tl.load(field + 4)
    length = tl.load(field + 5)
    start = tl.load(field + 6)
    lane = tl.program_id(0) * ROWS
    if (sequence < 0) | (lane // HEADS >= length):
        return
    lanes = lane + tl.arange(0, ROWS)
    token, head = lanes // HEADS, lanes % HEADS
    row_live = token < length
    rows = q + (row + token) * q_row_stride + head * q_head_stride
    query, query_rope = load_queries(rows, row_live, RANK, RANK_WIDTH, ROPE, ROPE_WIDTH)
    top, total, acc = walk(
        query,
        query_rope,
        latents,
        rotated,
        scales,
        block_tables + sequence * table_stride,
        first,
        end,
        start + token,
        scale,
        block_stride,
        slot_stride,
        rope_block_stride,
        rope_slot_stride,
        scale_block_stride,
        scale_slot_stride,
        ROWS,
        RANK,
        RANK_WIDTH,
        ROPE,
        ROPE_WIDTH,
        BLOCK_SIZE,
        TILE,
        SCALED,
    )
    value = average(total, acc)
    dims = tl.arange(0, RANK_WIDTH)
    live = row_live[:, None] & (dims < RANK)[None, :]
    if num_splits == 1:
        rows = out + (row + token) * out_row_stride + head * out_head_stride
        tl.store(rows[:, None] + dims[None, :], value.to(out.dtype.element_ty), mask=live)
    else:
        place = (item * SPAN + token) * HEADS + head
        total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing of it: top is -inf
        tl.store(lse + place, top + tl.log2(total), mask=row_live)
        tl.store(values + place[:, None] * RANK + dims[None, :], value, mask=live)
