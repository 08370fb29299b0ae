"""The block-major pool: a row of bytes is the image of a block."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kv.arguments import check_images, checked_blocks
from quire.kv.cuda_copies import Addresses, copy_all
from quire.kv.pools.block_pool import BlockPool, Blocks, Transfer


class ImagePool(BlockPool[int]):
    """`[num_blocks, block_bytes]`: one row after another, and in each the image of a block.

    Images of a KV group have `image_bytes[group]`; what is behind them in a row is padding, which
    is not copied.
    """

    def __init__(self, images: Tensor, image_bytes: Sequence[int] = ()) -> None:
        """Without `image_bytes` there is one group, whose images fill the rows."""
        check_images(images, image_bytes)
        super().__init__(images.device, images.shape[0], image_bytes or (images.shape[1],))
        self.images = images

    @property
    def block_bytes(self) -> int:
        """Room for an image of any group."""
        return self.images.shape[1]

    def checked(self, blocks: Blocks) -> list[int]:
        return checked_blocks(blocks, self.num_blocks)

    def to_host(
        self,
        blocks: Sequence[int],
        images: Tensor,
        slots: Sequence[int],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        size = self._image_bytes[group]
        return self._copy(self.images, blocks, images, slots, size, self._outward, after)

    def from_host(
        self,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[int],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        size = self._image_bytes[group]
        return self._copy(images, slots, self.images, blocks, size, self._inward, after)

    def _copy(
        self,
        source: Tensor,
        rows: Sequence[int],
        target: Tensor,
        places: Sequence[int],
        size: int,
        stream: torch.cuda.Stream | None,
        after: torch.cuda.Event | None,
    ) -> Transfer:
        began = time.perf_counter()
        if stream is None:
            for row, place in zip(rows, places, strict=True):
                target[place, :size].copy_(source[row, :size])
            return Transfer(seconds=time.perf_counter() - began)
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            copy_all(_addresses(source, rows), _addresses(target, places), size, stream)
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return Transfer(event, began)


def _addresses(images: Tensor, rows: Sequence[int]) -> Addresses:
    return np.asarray(rows, dtype=np.uint64) * images.stride(0) + images.data_ptr()
