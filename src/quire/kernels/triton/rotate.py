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

from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.triton.attention.tiles import scale_arguments
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.write import quantise

_FEW = 64  # tokens: up to here many small programs are faster, above that few large ones


def rotate_and_write(
    qkv: Tensor,
    scale: HeadScale | None,
    rotation: Rotation,
    pages: Tensor,
    scales: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """`pages` is one layer of the pool, `[blocks, 2, kv_heads, block_size, head_dim]`, and `scales`
    where those of fp8 go."""
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, block_size = pages.shape[2:4]
    heads = all_heads - 2 * kv_heads
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    width = triton.next_power_of_2(head_dim)
    features = 1024 if tokens <= _FEW else 8192
    together = min(triton.next_power_of_2(all_heads), max(1, features // width))
    _rotate_and_write[(tokens, triton.cdiv(all_heads, together))](
        qkv,
        qkv if scale is None else scale.weight,
        rotation.cos,
        rotation.sin,
        out,
        pages,
        slots,
        0.0 if scale is None else scale.eps,
        *qkv.stride(),
        rotation.cos.stride(0),
        rotation.sin.stride(0),
        *pages.stride()[:4],
        *scale_arguments(pages, scales),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        TOGETHER=together,
        NORMED=scale is not None,
        SCALED=scales is not None,
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
    head_stride,
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
    turns = (head < HEADS + KV_HEADS)[:, None]
    live = (head < HEADS + 2 * KV_HEADS)[:, None] & dim_live[None, :]

    wait_then_trigger(PDL)
    source = qkv + token * token_stride + head[:, None] * head_stride
    raw = tl.load(source + dim[None, :] * dim_stride, mask=live, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(source + partner[None, :] * dim_stride, mask=live & turns, other=0.0)
    y = y.to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        row = weight + head[:, None] * HEAD_DIM
        x = _weigh(x * factor, row + dim[None, :], live & turns, dtype)
        y = _weigh(y * factor, row + partner[None, :], live & turns, dtype)
    c = tl.load(cos + token * cos_stride + dim, mask=dim_live, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + dim, mask=dim_live, other=0.0).to(tl.float32)
    turned = (x * c[None, :] + y * s[None, :]).to(dtype)

    is_q = (head < HEADS)[:, None]
    to = out + (token * HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(to, turned, mask=live & is_q)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        page = pages + block * block_stride + offset * slot_stride
        which, kv_head = (head - HEADS) // KV_HEADS, (head - HEADS) % KV_HEADS
        place = page + (which * kv_stride + kv_head * page_head_stride)[:, None] + dim[None, :]
        kv = tl.where(turns, turned, raw)
        is_kv = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
        if SCALED:
            kv, kv_scale = quantise(kv.to(tl.float32))
            at = scales + block * scale_block_stride + offset
            at += which * scale_kv_stride + kv_head * scale_head_stride
            tl.store(at, kv_scale, mask=is_kv)
        tl.store(place, kv, mask=live & is_kv[:, None])


@triton.jit
def _weigh(x, weight, mask, dtype: tl.constexpr):
    """Rounded, weighted, and rounded again, as models were trained."""
    scale = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    return (x.to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
