"""Writing the KV of new tokens into their slots: one program for each token.

Each head is written to fp8 pages scaled by its own largest number (see `kernels/fp8.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import LARGEST
from quire.kernels.pages import LayerPages
from quire.kernels.triton.attention.tiles import scale_arguments
from quire.kernels.triton.sizes import next_power_of_2

_LARGEST: tl.constexpr = tl.constexpr(LARGEST)


def write_kv(pages: LayerPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    tokens, kv_heads, _ = k.shape
    if tokens == 0:
        return
    _write[(tokens,)](
        pages.k,
        pages.v,
        k,
        v,
        slots,
        *pages.k.stride()[:3],
        *pages.v.stride()[1:3],
        *scale_arguments(pages),
        *k.stride(),
        *v.stride(),
        KV_HEADS=kv_heads,
        HEADS=next_power_of_2(kv_heads),
        HEAD_DIM=pages.k_width,
        WIDTH=next_power_of_2(pages.k_width),
        V_DIM=pages.v_width,
        V_WIDTH=next_power_of_2(pages.v_width),
        BLOCK_SIZE=pages.block_size,
        SCALED=pages.k_scales is not None,
    )


@triton.jit
def quantise(x):
    """Rows of fp8 and what to multiply each by; a row of zeros by 0."""
    largest = tl.max(tl.abs(x), 1)
    factor = tl.where(largest > 0.0, _LARGEST / largest, 0.0)
    return (x * factor[:, None]).to(tl.float8e4nv), largest / _LARGEST


@triton.jit
def _write(
    k_pages,
    v_pages,
    k,
    v,
    slots,
    block_stride,
    k_page_head_stride,
    k_slot_stride,
    v_page_head_stride,
    v_slot_stride,
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
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head, dim, v_dim = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
        head_live = head < KV_HEADS
        k_live = head_live[:, None] & (dim < HEAD_DIM)[None, :]
        v_live = head_live[:, None] & (v_dim < V_DIM)[None, :]
        source = head[:, None] * k_head_stride + dim[None, :] * k_dim_stride
        k_row = tl.load(k + token * k_token_stride + source, mask=k_live, other=0.0)
        source = head[:, None] * v_head_stride + v_dim[None, :] * v_dim_stride
        v_row = tl.load(v + token * v_token_stride + source, mask=v_live, other=0.0)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        if SCALED:
            k_row, k_scale = quantise(k_row.to(tl.float32))
            v_row, v_scale = quantise(v_row.to(tl.float32))
            at = scales + block * scale_block_stride + head * scale_head_stride + offset
            tl.store(at, k_scale, mask=head_live)
            tl.store(at + scale_kv_stride, v_scale, mask=head_live)
        k_page = k_pages + block * block_stride + offset * k_slot_stride
        v_page = v_pages + block * block_stride + offset * v_slot_stride
        k_target = k_page + head[:, None] * k_page_head_stride + dim[None, :]
        v_target = v_page + head[:, None] * v_page_head_stride + v_dim[None, :]
        tl.store(k_target, k_row, mask=k_live)
        tl.store(v_target, v_row, mask=v_live)
