"""Block images in device memory, and their way to host memory and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_SEAM = 1 << 62


@dataclass
class Transfer:
    """Block images on their way between device and host."""

    event: torch.cuda.Event | None = None

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class ImagePool:
    """`[num_blocks, block_bytes]`: one image after another.

    With CUDA, copies run on streams of their own, one a direction, beside whatever is computed.
    """

    def __init__(self, images: Tensor) -> None:
        self.images = images
        cuda = images.is_cuda
        self._outward = torch.cuda.Stream(images.device) if cuda else None
        self._inward = torch.cuda.Stream(images.device) if cuda else None

    @property
    def block_bytes(self) -> int:
        return self.images.shape[1]

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
        seam: int = NO_SEAM,
    ) -> Transfer:
        """Begin to copy blocks into rows of `images` (pinned memory, with CUDA).

        `after`: a mark behind the kernels that write the blocks. `seam`: no copy may reach over a
        multiple of so many slots.
        """
        runs = self._runs(slots, blocks, images, seam)
        pairs = [(self.images[b : b + n], images[s : s + n]) for s, b, n in runs]
        return self._copy(pairs, self._outward, after)

    def from_host(
        self,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[int],
        after: torch.cuda.Event | None = None,
        seam: int = NO_SEAM,
    ) -> Transfer:
        """Begin to copy rows of `images` into blocks.

        `after`: a mark behind all kernels that may still read or write what these blocks held.
        """
        runs = self._runs(slots, blocks, images, seam)
        pairs = [(images[s : s + n], self.images[b : b + n]) for s, b, n in runs]
        return self._copy(pairs, self._inward, after)

    def _copy(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        stream: torch.cuda.Stream | None,
        after: torch.cuda.Event | None,
    ) -> Transfer:
        size = self.block_bytes
        if stream is None:
            for source, target in pairs:
                target[:, :size].copy_(source[:, :size])
            return Transfer()
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for source, target in pairs:
                target[:, :size].copy_(source[:, :size], non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return Transfer(event)

    def _runs(
        self, slots: Sequence[int], blocks: Sequence[int], images: Tensor, seam: int
    ) -> Iterator[tuple[int, int, int]]:
        """Neighbours on both sides, which are one range of bytes: first slot, first block, count.

        Where images are padded to whole pages, each goes alone.
        """
        packed = images.stride(0) == self.block_bytes
        start = 0
        for at in range(1, len(slots) + 1):
            together = (
                packed
                and at < len(slots)
                and slots[at] == slots[at - 1] + 1
                and blocks[at] == blocks[at - 1] + 1
                and slots[at] % seam != 0
            )
            if not together:
                yield slots[start], blocks[start], at - start
                start = at
