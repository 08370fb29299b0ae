"""One layer's pages: where its K and V lie in the pool, as kernels read and write them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.fp8 import (
    FP8,
    SCALE,
    dequantise_groups,
    is_fp8,
    num_groups,
    quantise_groups,
    scales_of,
)


class PageShape(NamedTuple):
    """How the pages of K, or of V, lie in the pool."""

    block_stride: int  # numbers from one block to the next
    kv_heads: int
    block_size: int
    width: int

    @classmethod
    def of(cls, pages: Tensor) -> PageShape:
        _, kv_heads, block_size, width = pages.shape
        block_stride, *strides = pages.stride()
        assert strides == [block_size * width, width, 1], "pages are packed by head"
        return cls(block_stride, kv_heads, block_size, width)


@dataclass(frozen=True, eq=False)
class LayerPages:
    """Views into a block-major pool, made once for each layer. K and V may differ in width."""

    k: Tensor  # [blocks, kv_heads, block_size, width]
    v: Tensor
    k_scales: Tensor | None = None  # float32 [blocks, kv_heads, block_size], where pages are fp8
    v_scales: Tensor | None = None
    group: int = 0  # the KV group whose tables name the layer's blocks

    def __post_init__(self) -> None:
        assert self.k_shape[:3] == self.v_shape[:3], "K and V are in the same blocks"

    @cached_property
    def k_shape(self) -> PageShape:
        return PageShape.of(self.k)

    @cached_property
    def v_shape(self) -> PageShape:
        return PageShape.of(self.v)

    @cached_property
    def kv_heads(self) -> int:
        return self.k_shape.kv_heads

    @cached_property
    def block_size(self) -> int:
        return self.k_shape.block_size

    @cached_property
    def k_width(self) -> int:
        return self.k_shape.width

    @cached_property
    def v_width(self) -> int:
        return self.v_shape.width

    @cached_property
    def k_to_v(self) -> int:
        """Numbers from the first of K to the first of V."""
        return _distance(self.k, self.v)

    @cached_property
    def k_to_v_scales(self) -> int:
        assert self.k_scales is not None and self.v_scales is not None
        return _distance(self.k_scales, self.v_scales)


@dataclass(frozen=True, eq=False)
class LatentPages:
    """One layer's pages where it stores one vector for each token (MLA): the latent, from which all
    heads' K and V are computed, then the rotated features that the keys of all heads share."""

    latents: Tensor  # [blocks, block_size, rank]
    rotated: Tensor  # [blocks, block_size, rope]
    scales: Tensor | None = None  # float32 [blocks, block_size, groups], where latents are fp8
    group: int = 0  # the KV group whose tables name the layer's blocks

    @classmethod
    def of(cls, values: Tensor, rank: int, group: int = 0) -> LatentPages:
        """Pages `[blocks, block_size, rank + rope]` of one type."""
        return cls(values[..., :rank], values[..., rank:], None, group)

    @classmethod
    def in_fp8(cls, records: Tensor, rank: int, dtype: torch.dtype, group: int = 0) -> LatentPages:
        """Of bytes `[blocks, block_size, latent_bytes]`; rotated features are in `dtype`."""
        scales = num_groups(rank) * SCALE.itemsize
        return cls(
            records[..., :rank].view(FP8),
            records[..., rank + scales :].view(dtype),
            records[..., rank : rank + scales].view(SCALE),
            group,
        )

    @cached_property
    def values(self) -> Tensor:
        """Latents and rotated features in one, which they are but in fp8."""
        assert self.scales is None
        latents = self.latents
        return latents.as_strided((*latents.shape[:2], self.rank + self.rope), latents.stride())

    @cached_property
    def rank(self) -> int:
        """Numbers of a latent."""
        return self.latents.shape[2]

    @cached_property
    def block_size(self) -> int:
        return self.latents.shape[1]

    @cached_property
    def rope(self) -> int:
        """Rotated features."""
        return self.rotated.shape[2]

    def read(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """What is in these slots, `[…, rank + rope]`."""
        if self.scales is None:
            return self.values[blocks, offsets].to(dtype)
        latents = dequantise_groups(self.latents[blocks, offsets], self.scales[blocks, offsets])
        return torch.cat((latents.to(dtype), self.rotated[blocks, offsets].to(dtype)), -1)

    def write(self, blocks: Tensor, offsets: Tensor, numbers: Tensor) -> None:
        """Put `[…, rank + rope]` into these slots."""
        if self.scales is None:
            self.values[blocks, offsets] = numbers
            return
        latents, rotated = numbers.split((self.rank, self.rope), -1)
        values, self.scales[blocks, offsets] = quantise_groups(latents)
        self.latents.view(torch.uint8)[blocks, offsets] = values.view(torch.uint8)
        self.rotated[blocks, offsets] = rotated


def _distance(first: Tensor, second: Tensor) -> int:
    return (second.data_ptr() - first.data_ptr()) // first.element_size()


def pages_of(pool: Tensor) -> tuple[LayerPages, ...]:
    """The layers of a pool `[blocks, layers, K and V, kv_heads, block_size, width]`."""
    values = [layer.unbind(1) for layer in pool.unbind(1)]
    if not is_fp8(pool):
        return tuple(LayerPages(k, v) for k, v in values)
    scales = [layer.unbind(1) for layer in scales_of(pool).unbind(1)]
    return tuple(
        LayerPages(k, v, k_scales, v_scales)
        for (k, v), (k_scales, v_scales) in zip(values, scales, strict=True)
    )
