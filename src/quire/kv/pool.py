"""The memory behind the blocks, and the few ways to touch it."""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import FP8, SCALE, dequantise
from quire.kernels.pages import LatentPages, LayerPages
from quire.kv.images import ImagePool
from quire.kv.layout import KVLayout
from quire.kv.table import BlockCopy


class PagedKVCache(ImagePool):
    """One row of bytes for each block; `layout` says what is where in a row of which group.

    Kernels read `layers`, which are views of `images`; transfers between tiers move `images`, which
    have all bytes of a block.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, backend: Backend
    ) -> None:
        self.layout = layout
        self.backend = backend
        size = (num_blocks, layout.block_bytes)
        super().__init__(_zeros(size, device), layout.image_bytes)
        self.layers = tuple(map(self._pages, range(len(layout.group_of))))

    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Put the KV of a step's tokens into their slots."""
        pages = self.layers[layer]
        assert isinstance(pages, LayerPages)
        self.backend.begin(batch)
        self.backend.write_kv(pages, k, v, batch)

    @cached_property
    def tensor(self) -> Tensor:
        """The pool of one group of equal streams: `[blocks, layers, streams, heads, …, width]`."""
        (group,), stream = self.layout.groups, self.layout.groups[0].streams[0]
        shape = (len(group.layers), len(group.streams), stream.heads, self.layout.block_size)
        return self._view(0, (*shape, stream.width), self.layout.dtype)

    def _pages(self, layer: int) -> LayerPages | LatentPages:
        first = self.layout.places[layer][0].stream
        if first.rank is not None:
            return self._latent_pages(layer, first.rank)
        (k, k_scales), (v, v_scales) = self.stream(layer, 0), self.stream(layer, 1)
        return LayerPages(k, v, k_scales, v_scales, self.layout.group_of[layer])

    def _latent_pages(self, layer: int, rank: int) -> LatentPages:
        layout, group = self.layout, self.layout.group_of[layer]
        if layout.dtype != FP8:
            values, _ = self.stream(layer, 0)
            return LatentPages.of(values[:, 0], rank, group)
        (place,) = layout.places[layer]
        shape = (layout.block_size, layout.value_bytes(place.stream))
        records = self._view(place.values, shape, torch.uint8)
        return LatentPages.in_fp8(records, rank, layout.rotated, group)

    def stream(self, layer: int, number: int) -> tuple[Tensor, Tensor | None]:
        """Values `[blocks, heads, block_size, width]` of a layer's stream, and their scales."""
        place, size = self.layout.places[layer][number], self.layout.block_size
        heads, width = place.stream.heads, place.stream.width
        values = self._view(place.values, (heads, size, width), self.layout.dtype)
        if place.scales is None:
            return values, None
        return values, self._view(place.scales, (heads, size), SCALE)

    def _view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The bytes of every row from `offset` on, as an array of this shape."""
        size = prod(shape) * dtype.itemsize
        values: Tensor = self.images[:, offset : offset + size].view(dtype).unflatten(1, shape)
        return values

    def gather(self, layer: int, block_ids: Tensor, length: int) -> tuple[Tensor, ...]:
        """Each stream of a sequence as `[length, heads, width]`: plain, slow, the reference.

        `block_ids` are the sequence's blocks in the group of that layer.
        """
        return tuple(
            self._gather(layer, number, block_ids.long())[:length]
            for number in range(len(self.layout.places[layer]))
        )

    def _gather(self, layer: int, number: int, block_ids: Tensor) -> Tensor:
        pages = self.layers[layer]
        if isinstance(pages, LatentPages):
            slots = torch.arange(pages.block_size, device=block_ids.device)
            latents = pages.read(block_ids.unsqueeze(1), slots, pages.rotated.dtype)
            return latents.flatten(0, 1).unsqueeze(1)
        values, scales = self.stream(layer, number)
        found = values[block_ids]
        if scales is not None:
            found = dequantise(found, scales[block_ids])
        return found.transpose(1, 2).flatten(0, 1)

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
            if self.images.is_cuda:
                pairs = pairs.pin_memory().to(self.images.device, non_blocking=True)
            self.backend.copy_blocks(self.images, pairs[:, 0], pairs[:, 1])


def _zeros(size: tuple[int, int], device: torch.device) -> Tensor:
    if device.type == "cpu":  # memory that is taken page by page, as it is first written
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)
