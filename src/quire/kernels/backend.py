"""The contract every attention backend keeps, and the choice among them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.batch import AttentionBatch


class AttentionBackend(Protocol):
    """Reads and writes the pool `[blocks, layers, 2, kv_heads, block_size, head_dim]`."""

    name: str

    def write_kv(
        self, cache: Tensor, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch
    ) -> None:
        """Put `k` and `v` `[tokens, kv_heads, head_dim]` into their slots."""

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend `q` `[tokens, heads, head_dim]` to the pages of its sequences.

        The step's own KV is already written, for all its sequences. With a `window` a token sees
        that many positions at most, itself included.
        """
        ...

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy whole block images, all layers, from `sources` to `targets` (int64 ids)."""


def attention_backend(device: torch.device) -> AttentionBackend:
    if device.type == "cuda":
        try:
            from quire.kernels.triton import TritonBackend
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"A GPU needs {missing.name}; pip install 'quire[gpu]' or use device='cpu'."
            ) from None
        return TritonBackend()
    from quire.kernels.cpu import CpuBackend

    return CpuBackend()
