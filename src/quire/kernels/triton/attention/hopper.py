"""Attention of long prompts on Hopper GPUs, over K and V that were gathered from their pages.

A program has three warpgroups: one loads tiles of K and V ahead of the two that compute
(`hopper_warpgroup.py`), and both sides tell each other by barriers what is there and what is free.

This is written in Gluon, a language in Triton that says which warps do what and when; Triton's own
pipelining waits for each product, and is a third slower. Gluon cannot be interpreted.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.scoring import Scoring
from quire.kernels.triton.attention.hopper_warpgroup import compute
from quire.kernels.triton.attention.softmax import LOG2_E
from quire.kernels.triton.attention.tiles import GATHERED_KEYS
from quire.kernels.triton.gluon_names import tma_load

_STAGES = 2
_REGISTERS = 240  # of a thread that computes; one that loads needs few


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    jobs: Tensor,
    group: int,
    first_head: int,
    scoring: Scoring,
    out: Tensor,
) -> None:
    """For each job (see `dense.py`), attend its tokens to `k` and `v` `[kv_heads, rows, head_dim]`.

    These are contiguous and hold the KV heads from `first_head` on, each shared by a `group` of the
    heads of `q` and `out` `[tokens, heads, head_dim]`, whose last dimension is contiguous. Of
    `scoring`, scale and sinks count.
    """
    kv_heads, rows, head_dim = k.shape
    k_tiles, v_tiles = (_tiles(x.view(-1, head_dim), head_dim) for x in (k, v))
    _attend[(len(jobs), kv_heads)](
        q,
        k_tiles,
        k_tiles,
        v_tiles,
        jobs,
        out,
        out if scoring.sinks is None else scoring.sinks,
        scoring.scale * LOG2_E,
        rows,
        0,
        0,
        first_head,
        *q.stride()[:2],
        *out.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        ROPE=0,
        STAGES=_STAGES,
        KEYS=GATHERED_KEYS,
        SINKS=scoring.sinks is not None,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )


def attend_expanded(
    q: Tensor, kv: Tensor, k_rope: Tensor, jobs: Tensor, scale: float, out: Tensor
) -> None:
    """The same over `kv` `[context, heads, 2 * head_dim]`, each head's K and then its V, and
    `k_rope` `[context, rope]`, further features of all heads' K. Each head of q has its own."""
    context, heads, both = kv.shape
    head_dim, rope = both // 2, k_rope.shape[1]
    tiles = _tiles(kv.view(context, heads * both), head_dim)
    _attend[(len(jobs), heads)](
        q,
        tiles,
        _tiles(k_rope, rope),
        tiles,
        jobs,
        out,
        out,
        scale * LOG2_E,
        0,
        both,
        head_dim,
        0,
        *q.stride()[:2],
        *out.stride()[:2],
        GROUP=1,
        HEAD_DIM=head_dim,
        ROPE=rope,
        STAGES=_STAGES,
        KEYS=GATHERED_KEYS,
        SINKS=False,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )


def _tiles(rows: Tensor, width: int) -> TensorDescriptor:
    layout = _layout(width, rows.dtype)
    return TensorDescriptor.from_tensor(rows, [GATHERED_KEYS, width], layout)


@memoise
def _layout(head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    half = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([GATHERED_KEYS, head_dim], half)


@gluon.jit(do_not_specialize=["rows", "first_head"])
def _attend(
    q,
    k_tiles,
    rope_tiles,
    v_tiles,
    jobs,
    out,
    sinks,
    scale,
    rows,
    columns,
    k_to_v,
    first_head,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    SINKS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """A head's K is `rows` below that of the head before it, or `columns` beside it, and its V
    `k_to_v` columns further."""
    job = jobs + gl.program_id(0) * 4
    row = gl.load(job).to(gl.int64)
    tokens = gl.load(job + 1)
    position = gl.load(job + 2)
    start = gl.program_id(1) * rows + gl.load(job + 3)
    tiles = gl.cdiv(position + tokens, KEYS)
    head = first_head + gl.program_id(1)

    dtype: gl.constexpr = q.dtype.element_ty
    ks = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], k_tiles.layout)
    ropes = ks
    if ROPE > 0:
        ropes = gl.allocate_shared_memory(dtype, [STAGES, KEYS, ROPE], rope_tiles.layout)
    vs = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], v_tiles.layout)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    has_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has_k.index(i), count=1)
        mbarrier.init(has_v.index(i), count=1)
        mbarrier.init(free_k.index(i), count=2)  # when both warpgroups are done with it
        mbarrier.init(free_v.index(i), count=2)

    gl.warp_specialize(
        [
            (compute, (
                q, out, sinks, ks, ropes, vs, has_k, has_v, free_k, free_v,
                row, tokens, position, tiles, head, scale,
                q_row_stride, q_head_stride, out_row_stride, out_head_stride,
                GROUP, HEAD_DIM, ROPE, KEYS, STAGES, SINKS, 0,
            )),
            (compute, (
                q, out, sinks, ks, ropes, vs, has_k, has_v, free_k, free_v,
                row, tokens, position, tiles, head, scale,
                q_row_stride, q_head_stride, out_row_stride, out_head_stride,
                GROUP, HEAD_DIM, ROPE, KEYS, STAGES, SINKS, 1,
            )),
            (_load, (
                k_tiles, rope_tiles, v_tiles, ks, ropes, vs, has_k, has_v, free_k, free_v, start,
                gl.program_id(1) * columns, k_to_v, tiles, ROPE, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _load(
    k_tiles,
    rope_tiles,
    v_tiles,
    ks,
    ropes,
    vs,
    has_k,
    has_v,
    free_k,
    free_v,
    start,
    column,
    k_to_v,
    tiles,
    ROPE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    for i in range(tiles):
        at = i % STAGES
        phase = (i // STAGES) & 1
        row = start + (tiles - 1 - i) * KEYS
        mbarrier.wait(free_k.index(at), phase ^ 1)
        if ROPE > 0:
            both: gl.constexpr = k_tiles.block_type.nbytes + rope_tiles.block_type.nbytes
            mbarrier.expect(has_k.index(at), both)
            tma_load(rope_tiles, [row, 0], has_k.index(at), ropes.index(at))
        else:
            mbarrier.expect(has_k.index(at), k_tiles.block_type.nbytes)
        tma_load(k_tiles, [row, column], has_k.index(at), ks.index(at))
        mbarrier.wait(free_v.index(at), phase ^ 1)
        mbarrier.expect(has_v.index(at), v_tiles.block_type.nbytes)
        tma_load(v_tiles, [row, column + k_to_v], has_v.index(at), vs.index(at))
