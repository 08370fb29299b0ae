"""Writing the KV of new tokens into their slots: one program for each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_kv(pages: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """`pages` is one layer of the pool, `[blocks, 2, kv_heads, block_size, head_dim]`."""
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    _write[(tokens,)](
        pages,
        k,
        v,
        slots,
        *pages.stride()[:4],
        *k.stride(),
        *v.stride(),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=pages.shape[3],
        WIDTH=triton.next_power_of_2(kv_heads * head_dim),
    )


@triton.jit
def _write(
    pages,
    k,
    v,
    slots,
    block_stride,
    kv_stride,
    head_stride,
    slot_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        lane = tl.arange(0, WIDTH)
        head, dim = lane // HEAD_DIM, lane % HEAD_DIM
        live = lane < KV_HEADS * HEAD_DIM
        source = token * k_token_stride + head * k_head_stride + dim * k_dim_stride
        k_row = tl.load(k + source, mask=live)
        source = token * v_token_stride + head * v_head_stride + dim * v_dim_stride
        v_row = tl.load(v + source, mask=live)
        page = pages + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
        target = page + head * head_stride + dim
        tl.store(target, k_row, mask=live)
        tl.store(target + kv_stride, v_row, mask=live)
