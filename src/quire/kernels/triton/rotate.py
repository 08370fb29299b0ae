"""From a fused projection to a turned q and KV in its slots, in one pass.

A program takes some of one token's heads, whichever they are: those of q and k are normalised and
turned, those of v pass through; q goes to the output, k and v into their page. A feature's partner,
half a head away, is read a second time from the cache next to the registers, which costs less than
moving it between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.pages import LayerPages
from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.triton.attention.tiles import scale_arguments
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.sizes import cdiv, next_power_of_2
from quire.kernels.triton.write import quantise

_FEW = 128  # tokens: up to here many small programs are faster, above that few large ones


def rotate_and_write(
    qkv: Tensor,
    scale: HeadScale | None,
    rotation: Rotation,
    pages: LayerPages,
    slots: Tensor,
) -> Tensor:
    tokens, features = qkv.shape
    kv_heads, head_dim = pages.kv_heads, pages.k_width
    turned = (features - kv_heads * pages.v_width) // head_dim  # heads: those of q and k
    heads, all_heads = turned - kv_heads, turned + kv_heads
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    width = next_power_of_2(max(head_dim, pages.v_width))
    at_once = 1024 if tokens <= _FEW else 8192  # features
    together = min(next_power_of_2(all_heads), max(1, at_once // width))
    block_stride, head_stride, slot_stride, _ = pages.k.stride()
    _rotate_and_write[(tokens, cdiv(all_heads, together))](
        qkv,
        qkv if scale is None else scale.weight,
        rotation.cos,
        rotation.sin,
        out,
        pages.k,
        slots,
        0.0 if scale is None else scale.eps,
        *qkv.stride(),
        rotation.cos.stride(0),
        rotation.sin.stride(0),
        block_stride,
        pages.k_to_v,
        head_stride,
        slot_stride,
        *scale_arguments(pages),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        V_DIM=pages.v_width,
        WIDTH=width,
        BLOCK_SIZE=pages.block_size,
        TOGETHER=together,
        NORMED=scale is not None,
        SCALED=pages.k_scales is not None,
        **pdl_launch(qkv.device),
    )
    return out


@triton.jit
def _rotate_and_write(
    qkv,
    weight,
    cos,
    sin,
    out,
    pages,
    slots,
    eps,
    token_stride,
    dim_stride,
    cos_stride,
    sin_stride,
    block_stride,
    kv_stride,
    page_head_stride,
    slot_stride,
    scales,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    dim = tl.arange(0, WIDTH)
    half: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(dim < half, dim + half, dim - half)
    dim_live = dim < HEAD_DIM
    TURNED: tl.constexpr = HEADS + KV_HEADS
    turns = (head < TURNED)[:, None]
    live = (head < TURNED + KV_HEADS)[:, None] & dim_live[None, :]
    first = head * HEAD_DIM  # of its features
    if V_DIM != HEAD_DIM:
        first = tl.where(head < TURNED, first, TURNED * HEAD_DIM + (head - TURNED) * V_DIM)
        live = (head < TURNED + KV_HEADS)[:, None]
        live &= dim[None, :] < tl.where(head < TURNED, HEAD_DIM, V_DIM)[:, None]

    if NORMED:
        row = weight + head[:, None] * HEAD_DIM
        factors = tl.load(row + dim[None, :], mask=live & turns, other=0.0)
        partner_factors = tl.load(row + partner[None, :], mask=live & turns, other=0.0)
    wait_then_trigger(PDL)
    # All at once, before the first is looked at: waiting for one after the other takes longer.
    slot = tl.load(slots + token)
    source = qkv + token * token_stride + first[:, None] * dim_stride
    raw = tl.load(source + dim[None, :] * dim_stride, mask=live, other=0.0)
    y = tl.load(source + partner[None, :] * dim_stride, mask=live & turns, other=0.0)
    # For each head anew, from the cache: handing them from thread to thread takes longer.
    angle = tl.broadcast_to(dim[None, :], (TOGETHER, WIDTH))
    turning = live & turns
    c = tl.load(cos + token * cos_stride + angle, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + angle, mask=turning, other=0.0).to(tl.float32)
    x = raw.to(tl.float32)
    y = y.to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = _weigh(x * factor, factors, dtype)
        y = _weigh(y * factor, partner_factors, dtype)
    turned = (x * c + y * s).to(dtype)

    is_q = (head < HEADS)[:, None]
    to = out + (token * HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(to, turned, mask=live & is_q)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        page = pages + block * block_stride + offset * slot_stride
        which, kv_head = (head - HEADS) // KV_HEADS, (head - HEADS) % KV_HEADS
        start = which * kv_stride + kv_head * page_head_stride
        if V_DIM != HEAD_DIM:  # V is packed by head, too: its strides follow from its width
            v_start = kv_head * (BLOCK_SIZE * V_DIM) + offset * (V_DIM - slot_stride)
            start = tl.where(which == 0, start, kv_stride + v_start)
        place = page + start[:, None] + dim[None, :]
        kv = tl.where(turns, turned, raw)
        is_kv = (head >= HEADS) & (head < TURNED + KV_HEADS)
        if SCALED:
            kv, kv_scale = quantise(kv.to(tl.float32))
            at = scales + block * scale_block_stride + offset
            at += which * scale_kv_stride + kv_head * scale_head_stride
            tl.store(at, kv_scale, mask=is_kv)
        tl.store(place, kv, mask=live & is_kv[:, None])


@triton.jit
def _weigh(x, factors, dtype: tl.constexpr):
    """Rounded, weighted, and rounded again, as models were trained; those with weights in float32
    are rounded once."""
    if factors.dtype == dtype:
        x = x.to(dtype).to(tl.float32)
    return (x * factors.to(tl.float32)).to(dtype).to(tl.float32)
