"""The way of adapters from host memory into the slots of a GPU, beside the steps that run.

    pinned memory ── one copy, on a stream of its own ──► staging ── the steps' stream ──► a slot

An adapter is hundreds of small matrices. Host memory has them in one piece, which a copy engine
brings to the device while steps run, also steps that still read the slot. What is left to do
between two steps is to spread them over the slots, at the speed of the device's own memory. Of
several adapters for one step only the first comes beside the step before it: the room is for one.
Nothing here waits on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from quire.layers.adapters.image import AdapterImage


class KeptAdapter(NamedTuple):
    """An adapter in host memory."""

    image: AdapterImage  # what slots are filled from, once it is brought
    num_bytes: int
    host: Tensor | None = None  # on a GPU: all its matrices, in one piece of pinned memory


class NoStaging:
    """On a CPU, slots are filled from where adapters are kept."""

    num_bytes = 0

    def keep(self, image: AdapterImage) -> KeptAdapter:
        return KeptAdapter(image, image.num_bytes)

    @contextmanager
    def brought(self, kept: KeptAdapter) -> Iterator[AdapterImage]:
        yield kept.image


class Staging:
    """Room on a GPU for the matrices of one adapter."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._emptied = torch.cuda.Event()  # on the steps' stream, behind the last use of the room
        self._emptied.record(torch.cuda.current_stream(device))

    @property
    def num_bytes(self) -> int:
        return self._room.nbytes

    def keep(self, image: AdapterImage) -> KeptAdapter:
        """In pinned memory, as it will lie in the room; any thread may call this."""
        with torch.cuda.device(self._device):  # whose context pins memory; threads begin with 0
            host = torch.empty(image.packed_bytes, dtype=torch.uint8, pin_memory=True)
            pinned = image.packed_in(host)
            for there, here in zip(pinned.for_slots(), image.for_slots(), strict=True):
                there.copy_(here)
            staged = image.packed_in(self._room).with_pinned_ends()
            return KeptAdapter(staged, image.num_bytes, host)

    @contextmanager
    def brought(self, kept: KeptAdapter) -> Iterator[AdapterImage]:
        """The adapter on the device, for what is queued on the current stream meanwhile."""
        assert kept.host is not None
        self._stream.wait_event(self._emptied)
        with torch.cuda.stream(self._stream):
            self._room[: len(kept.host)].copy_(kept.host, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        try:
            yield kept.image
        finally:
            self._emptied.record(torch.cuda.current_stream(self._device))
