"""Long prompts: their pages are gathered into one piece, and a kernel made for the GPU walks that.

Gathering costs a read and a write of each token's KV, which with many new tokens is little beside
attending to it. A step's work is listed on the host, once for all layers:

    pieces   [sequence, first token]            for every 128 rows of gathered K and V
    jobs     [row of q, tokens, position, row]  for every program: the tokens it attends, where the
                                                first of them stands, and where its K and V begin;
                                                longest walks first
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LayerPages
from quire.kernels.scoring import Scoring
from quire.kernels.triton.attention.tiles import (
    GATHERED_KEYS,
    load_scales,
    load_tile,
    scale_arguments,
)
from quire.kernels.triton.sizes import next_power_of_2
from quire.kernels.triton.tried import is_hopper, tried

Index = npt.NDArray[np.int64]

ROWS = 128  # of q for a program: some tokens with all heads that share a KV head
LEAST = 4096  # new tokens: with fewer, two launches more cost what the better kernel saves
ROOM_BYTES = 2**28  # for gathered KV; where all heads need more, they take turns


@dataclass(frozen=True)
class Gathered:
    """The long prompts of a batch, laid end to end."""

    rows: int
    pieces: Tensor  # int32 [pieces, 2]
    jobs: Tensor  # int32 [jobs, 4]


def gather_plan(batch: AttentionBatch, q: Tensor, pages: LayerPages) -> Gathered | None:
    """What `dense_attention` works by, in every layer alike; None: it has nothing to do here."""
    group = q.shape[1] // pages.kv_heads
    lengths = np.array(batch.query_lens)
    long = np.flatnonzero(lengths >= LEAST)
    if not len(long) or pages.k_width != pages.v_width:
        return None
    if not is_supported(q.device, q.dtype, group, q.shape[2]):
        return None
    contexts = np.array(batch.contexts)[long]
    counts, sequence, first, starts = cut(contexts, GATHERED_KEYS)
    pieces = np.stack([long[sequence], first], axis=1)
    starts *= GATHERED_KEYS

    tokens = ROWS // group
    _, prompt, first, _ = cut(lengths[long], tokens)
    row = (np.cumsum(lengths) - lengths)[long][prompt] + first
    position = (contexts - lengths[long])[prompt] + first
    count = np.minimum(lengths[long][prompt] - first, tokens)
    jobs = np.stack([row, count, position, starts[prompt]], axis=1)
    jobs = jobs[np.argsort(-position, kind="stable")]

    # Jobs first: they are 16 bytes each, so what follows begins where kernels expect it to.
    both = torch.from_numpy(np.concatenate([jobs.ravel(), pieces.ravel()]).astype(np.int32))
    if q.is_cuda:
        both = both.pin_memory().to(q.device, non_blocking=True)
    jobs_there, pieces_there = both.split([jobs.size, pieces.size])
    return Gathered(
        int(counts.sum()) * GATHERED_KEYS, pieces_there.view(-1, 2), jobs_there.view(-1, 4)
    )


def cut(lengths: Index, size: int) -> tuple[Index, Index, Index, Index]:
    """Pieces of `size` of each length: how many, whose each is, where in it each begins, and the
    number of the first piece of each length."""
    counts = -(-lengths // size)
    starts = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(lengths)), counts)
    return counts, owner, (np.arange(len(owner)) - starts[owner]) * size, starts


def is_supported(device: torch.device, dtype: torch.dtype, group: int, head_dim: int) -> bool:
    return (
        dtype in (torch.float16, torch.bfloat16)
        and head_dim in (64, 128)
        and group <= ROWS
        and is_hopper(device)
        and _can_be_built(device, dtype, group, head_dim)
    )


@tried("Long prompts are")
def _can_be_built(device: torch.device, dtype: torch.dtype, group: int, head_dim: int) -> None:
    """One token, of itself."""
    from quire.kernels.triton.attention.hopper import attend

    q = torch.zeros(1, group, head_dim, dtype=dtype, device=device)
    kv = torch.zeros(1, GATHERED_KEYS, head_dim, dtype=dtype, device=device)
    jobs = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32, device=device)
    attend(q, kv, kv, jobs, group, 0, Scoring(1.0), torch.empty_like(q))


def dense_attention(
    q: Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    plan: Gathered,
    scoring: Scoring,
    out: Tensor,
) -> None:
    """Fill the rows of `out` that belong to the long prompts; without a window or a soft cap."""
    from quire.kernels.triton.attention.hopper import attend

    kv_heads, head_dim = pages.kv_heads, pages.k_width
    if q.stride(2) != 1:
        q = q.contiguous()
    per_head = 2 * plan.rows * head_dim * q.element_size()
    heads = max(1, min(kv_heads, ROOM_BYTES // per_head))
    room = torch.empty((2, heads, plan.rows, head_dim), dtype=q.dtype, device=q.device)
    for first in range(0, kv_heads, heads):
        k, v = room[:, : min(heads, kv_heads - first)]
        gather(pages, batch.block_tables, batch.context_lens, plan.pieces, first, k, v)
        attend(q, k, v, plan.jobs, q.shape[1] // kv_heads, first, scoring, out)


def gather(
    pages: LayerPages,
    tables: Tensor,
    context_lens: Tensor,
    pieces: Tensor,
    first_head: int,
    k: Tensor,
    v: Tensor,
) -> None:
    """Copy `pieces` of some heads to `k` and `v` `[heads, rows, head_dim]`; 0 past the context."""
    block_stride, head_stride, slot_stride, _ = pages.k.stride()
    _gather[(len(pieces), len(k))](
        pages.k,
        tables,
        context_lens,
        pieces,
        k,
        v,
        first_head,
        tables.stride(0),
        block_stride,
        pages.k_to_v,
        head_stride,
        slot_stride,
        *scale_arguments(pages),
        k.stride(0),
        ROWS=GATHERED_KEYS,
        HEAD_DIM=k.shape[2],
        WIDTH=next_power_of_2(k.shape[2]),
        BLOCK_SIZE=pages.block_size,
        SCALED=pages.k_scales is not None,
    )


@triton.jit(do_not_specialize=["first_head", "table_stride", "out_head_stride"])
def _gather(
    pages,
    tables,
    context_lens,
    pieces,
    k,
    v,
    first_head,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    slot_stride,
    scales,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
    out_head_stride,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    piece = pieces + tl.program_id(0) * 2
    sequence = tl.load(piece).to(tl.int64)
    position = tl.load(piece + 1) + tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = position < tl.load(context_lens + sequence)
    block = tl.load(tables + sequence * table_stride + position // BLOCK_SIZE, mask=live, other=0)
    head = first_head + tl.program_id(1)
    head_k, head_v = load_tile(
        pages + head * head_stride,
        pages,  # V is as wide as K, and needs no pointer of its own
        block,
        position,
        live,
        block_stride,
        kv_stride,
        slot_stride,
        BLOCK_SIZE,
        HEAD_DIM,
        WIDTH,
        HEAD_DIM,
        WIDTH,
    )
    if SCALED:
        k_scale, v_scale = load_scales(
            scales + head * scale_head_stride,
            block,
            position,
            live,
            scale_block_stride,
            scale_kv_stride,
            BLOCK_SIZE,
            SCALED,
        )
        head_k = head_k.to(tl.float32) * k_scale[:, None]
        head_v = head_v.to(tl.float32) * v_scale[:, None]
    dims = tl.arange(0, WIDTH)
    dim_live = (dims < HEAD_DIM)[None, :]
    target = tl.program_id(1).to(tl.int64) * out_head_stride + row[:, None] * HEAD_DIM
    target += dims[None, :]
    tl.store(k + target, head_k, mask=dim_live)
    tl.store(v + target, head_v, mask=dim_live)
