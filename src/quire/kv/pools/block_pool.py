"""What tiers ask of device memory: to copy the images of blocks to host memory and back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quire.kv.tiers.memory import HostMemory

Block = TypeVar("Block")  # as its pool knows it: its number, or the slots of its tokens
# Blocks as an engine gives them: numbers, or a row of slots for each.
Blocks = Sequence[int | Sequence[int]]


@dataclass(eq=False)
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


class BlockPool(ABC, Generic[Block]):
    """Blocks of device memory. Images of a KV group have `image_bytes[group]`, all of one call are
    of one group.

    With CUDA, copies run on streams of their own, one a direction, beside whatever is computed.
    """

    tokens_of_block: int | None = None  # where the pool knows
    num_layers: int | None = None  # of the first group's images, where the pool knows

    def __init__(self, device: torch.device, num_blocks: int, image_bytes: Sequence[int]) -> None:
        self.device = device
        self._num_blocks = num_blocks
        self._image_bytes = tuple(image_bytes)
        cuda = device.type == "cuda"
        self._outward = torch.cuda.Stream(device) if cuda else None
        self._inward = torch.cuda.Stream(device) if cuda else None

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        """Room for an image of any group."""
        return max(self.image_bytes)

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
        return HostMemory(self.block_bytes, num_slots, pinned=self.device.type == "cuda")

    @abstractmethod
    def checked(self, blocks: Blocks) -> list[Block]:
        """Blocks that an engine gave; a KVError where one cannot be, or is given twice."""

    def mark(self) -> torch.cuda.Event | None:
        """Now, as this thread's work on the device goes: copies can be told to wait for it."""
        if self._outward is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, transfer: Transfer) -> None:
        """Let this thread's work on the device, from now on, be behind a transfer."""
        if transfer.event is not None:
            torch.cuda.current_stream(self.device).wait_event(transfer.event)

    @abstractmethod
    def to_host(
        self,
        blocks: Sequence[Block],
        images: Tensor,
        slots: Sequence[int],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        """Begin to copy blocks into rows of `images` (pinned memory, with CUDA).

        `after`: a mark behind the kernels that write the blocks.
        """

    @abstractmethod
    def from_host(
        self,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[Block],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        """Begin to copy rows of `images` into blocks.

        `after`: a mark behind all kernels that may still read or write what these blocks held.
        """

    def from_host_by_layer(
        self,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[Block],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Iterator[Transfer]:
        """As `from_host`, with a transfer for each layer of the group, the first one first.

        A pool that knows nothing of layers has one transfer for all of them.
        """
        yield self.from_host(images, slots, blocks, after, group)
