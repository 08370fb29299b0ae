"""The shape of a block image: the same bytes in every tier."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.fp8 import FP8, SCALE


@dataclass(frozen=True)
class KVLayout:
    """One block: all layers, K and V, packed by head; contiguous. Scales of fp8 come last."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dim: int = 2  # K and V; 1 for models that cache one latent vector

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.kv_dim, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        rows = self.num_layers * self.kv_dim * self.num_kv_heads
        scale = SCALE.itemsize if self.dtype == FP8 else 0
        return rows * (self.head_dim * self.dtype.itemsize + scale)

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
