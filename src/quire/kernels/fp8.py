"""KV in eight bits: e4m3 values, and one float32 for the head of each token that scales them.

A head's largest number becomes the largest an e4m3 has, so that each head of each token uses its
whole range whatever the others hold, and a token is written without touching its neighbours. In a
block image the scales follow the values:

    [ values: layers, K and V, heads, tokens, head_dim | scales: layers, K and V, heads, tokens ]

A latent (MLA) has a scale for every 128 of its numbers, and the rotated features beside it, which
decide where a token looks, stay as they are. All of a token lies together:

    [ values: rank | scales: one for every 128 | rotated features, in the type of the model ]
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
GROUP = 128  # numbers of a latent that share a scale
LARGEST = 448.0
SCALE = torch.float32


def is_fp8(cache: Tensor) -> bool:
    return cache.dtype == FP8


def scales_of(cache: Tensor) -> Tensor:
    """The scales `[blocks, layers, 2, kv_heads, block_size]` behind the values of a pool."""
    rows = cache.shape[1:-1]
    values = cache[0].numel()
    stride = cache.stride(0) // SCALE.itemsize
    storage = torch.empty(0, dtype=SCALE, device=cache.device)
    storage.set_(cache.untyped_storage())  # the same bytes, read as float32
    offset = (cache.storage_offset() + values) // SCALE.itemsize
    strides = torch.empty(rows, device="meta").stride()
    return storage.as_strided((cache.shape[0], *rows), (stride, *strides), offset)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of `[..., head_dim]`; a head of zeros has the scale 0."""
    scale = x.float().abs().amax(-1) / LARGEST
    values = x.float() / scale.clamp(min=torch.finfo(SCALE).tiny).unsqueeze(-1)
    return values.clamp(-LARGEST, LARGEST).to(FP8), scale


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.unsqueeze(-1)


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales `[..., groups]` of latents `[..., rank]`; the last group may be shorter."""
    pairs = [quantise(group) for group in x.split(GROUP, dim=-1)]
    values = torch.cat([each.view(torch.uint8) for each, _ in pairs], -1).view(FP8)
    return values, torch.stack([scale for _, scale in pairs], -1)


def dequantise_groups(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.repeat_interleave(GROUP, -1)[..., : values.shape[-1]]


def num_groups(rank: int) -> int:
    return -(-rank // GROUP)


def latent_bytes(rank: int, rope: int, dtype: torch.dtype) -> int:
    """What a token takes whose latent is in fp8, and whose rotated features are in `dtype`."""
    return rank * FP8.itemsize + num_groups(rank) * SCALE.itemsize + rope * dtype.itemsize
