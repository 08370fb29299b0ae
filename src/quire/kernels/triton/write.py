"""Writing the KV of new tokens into their slots: one program for each token.

Each head is written to fp8 pages scaled by its own largest number (see `kernels/fp8.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import LARGEST
from quire.kernels.triton.attention.tiles import scale_arguments

_LARGEST: tl.constexpr = tl.constexpr(LARGEST)


def write_kv(pages: Tensor, scales: Tensor | None, k: Tensor, v: Tensor, slots: Tensor) -> None:
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
        *scale_arguments(pages, scales),
        *k.stride(),
        *v.stride(),
        KV_HEADS=kv_heads,
        HEADS=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=pages.shape[3],
        SCALED=scales is not None,
    )


@triton.jit
def quantise(x):
    """Rows of fp8 and what to multiply each by; a row of zeros by 0."""
    largest = tl.max(tl.abs(x), 1)
    factor = tl.where(largest > 0.0, _LARGEST / largest, 0.0)
    return (x * factor[:, None]).to(tl.float8e4nv), largest / _LARGEST


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
    scales,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
        live = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        source = head[:, None] * k_head_stride + dim[None, :] * k_dim_stride
        k_row = tl.load(k + token * k_token_stride + source, mask=live, other=0.0)
        source = head[:, None] * v_head_stride + dim[None, :] * v_dim_stride
        v_row = tl.load(v + token * v_token_stride + source, mask=live, other=0.0)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        if SCALED:
            k_row, k_scale = quantise(k_row.to(tl.float32))
            v_row, v_scale = quantise(v_row.to(tl.float32))
            at = scales + block * scale_block_stride + head * scale_head_stride + offset
            tl.store(at, k_scale, mask=head < KV_HEADS)
            tl.store(at + scale_kv_stride, v_scale, mask=head < KV_HEADS)
        page = pages + block * block_stride + offset * slot_stride
        target = page + head[:, None] * head_stride + dim[None, :]
        tl.store(target, k_row, mask=live)
        tl.store(target + kv_stride, v_row, mask=live)
