"""The memory behind the blocks, and the few ways to touch it."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import dequantise
from quire.kernels.pages import LayerPages, pages_of
from quire.kv.images import ImagePool
from quire.kv.layout import KVLayout
from quire.kv.table import BlockCopy


class PagedKVCache(ImagePool):
    """`[num_blocks, layers, K and V, kv_heads, block_size, head_dim]`, one image after another.

    Kernels read `layers`, which are views of `tensor`; transfers between tiers move `images`, which
    have all bytes of a block.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, backend: Backend
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.backend = backend
        size = (num_blocks, layout.block_bytes)
        super().__init__(_zeros(size, device))
        values = self.images[:, : prod(layout.block_shape) * layout.dtype.itemsize]
        self.tensor = values.view(layout.dtype).unflatten(1, layout.block_shape)
        self.layers: tuple[LayerPages, ...] = pages_of(self.tensor)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Put the KV of a step's tokens into their slots."""
        self.backend.begin(batch)
        self.backend.write_kv(self.layers[layer], k, v, batch)

    def gather(self, layer: int, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence as `[length, kv_heads, width]`: plain, slow, the reference."""
        pages, blocks = self.layers[layer], block_ids.long()
        k = _gather(pages.k, pages.k_scales, blocks, length)
        return k, _gather(pages.v, pages.v_scales, blocks, length)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy block images within the pool, as if one after the other, in one launch if it can be.

        A block that is read by one copy and written by another (it was given up and taken again
        while the step was planned) splits the launch.
        """
        batch: list[BlockCopy] = []
        touched: set[int] = set()  # sources and targets of the batch
        targets: set[int] = set()
        for source, target in copies:
            if target in touched or source in targets:
                self._copy_at_once(batch)
                batch, touched, targets = [], set(), set()
            batch.append((source, target))
            touched |= {source, target}
            targets.add(target)
        self._copy_at_once(batch)

    def _copy_at_once(self, copies: list[BlockCopy]) -> None:
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64)
            if self.tensor.is_cuda:
                pairs = pairs.pin_memory().to(self.tensor.device, non_blocking=True)
            self.backend.copy_blocks(self.images, pairs[:, 0], pairs[:, 1])


def _gather(pages: Tensor, scales: Tensor | None, blocks: Tensor, length: int) -> Tensor:
    found = pages[blocks]
    if scales is not None:
        found = dequantise(found, scales[blocks])
    return found.transpose(1, 2).flatten(0, 1)[:length]


def _zeros(size: tuple[int, int], device: torch.device) -> Tensor:
    if device.type == "cpu":  # memory that is taken page by page, as it is first written
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)
