"""Block images in device memory, and their way to host memory and back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kv.arguments import check_images
from quire.kv.cuda_copies import Addresses, copy_all
from quire.kv.tiers.memory import HostMemory


@dataclass
class Transfer:
    """Block images on their way between device and host."""

    event: torch.cuda.Event | None = None
    began: float = 0.0
    seconds: float = 0.0  # from the beginning to the end, once that has been waited for

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self.seconds = time.perf_counter() - self.began


class ImagePool:
    """`[num_blocks, block_bytes]`: one row after another, and in each the image of a block.

    Images of a KV group have `image_bytes[group]`; what is behind them in a row is padding, which
    is not copied. The blocks of one call are of one group.

    With CUDA, copies run on streams of their own, one a direction, beside whatever is computed.
    """

    def __init__(self, images: Tensor, image_bytes: Sequence[int] = ()) -> None:
        """Without `image_bytes` there is one group, whose images fill the rows."""
        check_images(images, image_bytes)
        self.images = images
        self._image_bytes = tuple(image_bytes) or (images.shape[1],)
        cuda = images.is_cuda
        self._outward = torch.cuda.Stream(images.device) if cuda else None
        self._inward = torch.cuda.Stream(images.device) if cuda else None

    @property
    def num_blocks(self) -> int:
        return self.images.shape[0]

    @property
    def block_bytes(self) -> int:
        """Room for an image of any group."""
        return self.images.shape[1]

    @property
    def image_bytes(self) -> tuple[int, ...]:
        """Bytes of an image of each group."""
        return self._image_bytes

    def moved_bytes(self, groups: Sequence[int]) -> int:
        """Bytes of images of these groups, one each."""
        sizes = self.image_bytes
        if len(sizes) == 1:
            return len(groups) * sizes[0]
        return sum(sizes[group] for group in groups)

    def host_memory(self, num_slots: int) -> HostMemory:
        """Room for so many images, from where they can be copied."""
        return HostMemory(self.block_bytes, num_slots, pinned=self.images.is_cuda)

    def mark(self) -> torch.cuda.Event | None:
        """Now, as this thread's work on the device goes: copies can be told to wait for it."""
        if self._outward is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.images.device))
        return event

    def to_host(
        self,
        blocks: Sequence[int],
        images: Tensor,
        slots: Sequence[int],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        """Begin to copy blocks into rows of `images` (pinned memory, with CUDA).

        `after`: a mark behind the kernels that write the blocks.
        """
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
        """Begin to copy rows of `images` into blocks.

        `after`: a mark behind all kernels that may still read or write what these blocks held.
        """
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
