"""Latents of new tokens into their slots: normalised, turned and written by one program a token,
which turns the queries as well."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import GROUP
from quire.kernels.pages import LatentPages
from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.sizes import next_power_of_2
from quire.kernels.triton.write import quantise


def rotate_and_write_latents(
    q: Tensor,
    kv: Tensor,
    scale: HeadScale,
    rotation: Rotation,
    pages: LatentPages,
    batch: AttentionBatch,
    out: Tensor,
) -> None:
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    _rotate_and_write[(tokens,)](
        q,
        kv,
        scale.weight,
        rotation.cos,
        rotation.sin,
        out,
        pages.latents,
        pages.rotated,
        pages.latents if pages.scales is None else pages.scales,
        batch.slot_mapping,
        scale.eps,
        *q.stride()[:2],
        kv.stride(0),
        rotation.cos.stride(0),
        *out.stride()[:2],
        *page_strides(pages),
        HEADS=heads,
        HEADS_WIDTH=next_power_of_2(heads),
        RANK=pages.rank,
        WIDTH=next_power_of_2(pages.rank),
        HALF=pages.rope // 2,
        HALF_WIDTH=next_power_of_2(pages.rope // 2),
        BLOCK_SIZE=pages.block_size,
        GROUP=min(GROUP, next_power_of_2(pages.rank)),
        SCALED=pages.scales is not None,
        **pdl_launch(q.device),
    )


def page_strides(pages: LatentPages) -> list[int]:
    """From block to block and from slot to slot: of latents, rotated features, and scales."""
    scales = pages.latents if pages.scales is None else pages.scales
    return [step for x in (pages.latents, pages.rotated, scales) for step in x.stride()[:2]]


@triton.jit
def _rotate_and_write(
    q,
    kv,
    weight,
    cos,
    sin,
    out,
    latents,
    rotated,
    scales,
    slots,
    eps,
    q_stride,
    q_head_stride,
    kv_stride,
    angle_stride,
    out_stride,
    out_head_stride,
    block_stride,
    slot_stride,
    rope_block_stride,
    rope_slot_stride,
    scale_block_stride,
    scale_slot_stride,
    HEADS: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    dims, half = tl.arange(0, WIDTH), tl.arange(0, HALF_WIDTH)
    heads = tl.arange(0, HEADS_WIDTH)
    live, half_live = dims < RANK, half < HALF
    factors = tl.load(weight + dims, mask=live, other=0.0).to(tl.float32)

    wait_then_trigger(PDL)
    # All at once, before the first is looked at: waiting for one after the other takes longer.
    slot = tl.load(slots + token)
    source_k = kv + token * kv_stride
    latent = tl.load(source_k + dims, mask=live, other=0.0).to(tl.float32)
    k_first = tl.load(source_k + RANK + half, mask=half_live, other=0.0).to(tl.float32)
    k_second = tl.load(source_k + RANK + HALF + half, mask=half_live, other=0.0).to(tl.float32)
    # The second half of cosines repeats the first, and that of sines has the other sign.
    c = tl.load(cos + token * angle_stride + half, mask=half_live, other=0.0).to(tl.float32)
    s = tl.load(sin + token * angle_stride + HALF + half, mask=half_live, other=0.0)
    s = s.to(tl.float32)
    mask = (heads < HEADS)[:, None] & half_live[None, :]
    source = q + token * q_stride + heads[:, None] * q_head_stride + half[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out + token * out_stride + heads[:, None] * out_head_stride + half[None, :]
    tl.store(target, (first * c[None, :] - second * s[None, :]).to(dtype), mask=mask)
    tl.store(target + HALF, (second * c[None, :] + first * s[None, :]).to(dtype), mask=mask)

    if slot >= 0:
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        latent = latent.to(dtype).to(tl.float32) * factors  # rounded first, as models were trained
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        page = latents + block * block_stride + offset * slot_stride
        if SCALED:
            groups = tl.reshape(latent.to(dtype).to(tl.float32), [WIDTH // GROUP, GROUP])
            values, factor = quantise(groups)
            tl.store(page + dims, tl.reshape(values, [WIDTH]), mask=live)
            place = tl.arange(0, WIDTH // GROUP)
            page_scales = scales + block * scale_block_stride + offset * scale_slot_stride
            tl.store(page_scales + place, factor, mask=place * GROUP < RANK)
        else:
            tl.store(page + dims, latent.to(dtype), mask=live)
        page = rotated + block * rope_block_stride + offset * rope_slot_stride + half
        tl.store(page, (k_first * c - k_second * s).to(dtype), mask=half_live)
        tl.store(page + HALF, (k_second * c + k_first * s).to(dtype), mask=half_live)
