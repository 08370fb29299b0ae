"""The way between streams on a GPU and pinned host memory: through a staging buffer on the GPU.

    streams ── one kernel, many blocks and layers ──▶ images, staged ── copy engine ──▶ host slots

The kernel runs at the speed of the GPU's memory, and the copy engine moves whole images. So the bus
is used as well as by a block-major pool, and what is computed beside it loses little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.triton.streams import AlikeStreams, alike, move_streams
from quire.kv.cuda_copies import copy_all
from quire.kv.pools.streams import StreamRun

HALF_BYTES = 32 << 20  # of the buffer: enough for full speed, little to wait for
ALIGNMENT = 16


class Staging:
    """One direction. While one half of its buffer is being copied, the kernel is at the other."""

    def __init__(self, copies: torch.cuda.Stream, image_bytes: int) -> None:
        self._copies = copies
        self._kernels = torch.cuda.Stream(copies.device)
        size = max(HALF_BYTES, _aligned(image_bytes))
        self._halves = torch.empty(2, size, dtype=torch.uint8, device=copies.device)
        self._left: list[torch.cuda.Event | None] = [None, None]  # when each half is free again
        self._next = 0
        self._kinds: WeakKeyDictionary[StreamRun, list[AlikeStreams]] = WeakKeyDictionary()

    def move(
        self,
        run: StreamRun,
        blocks: Sequence[Any],
        images: Tensor,
        slots: Sequence[int],
        after: torch.cuda.Event | None,
        to_host: bool,
    ) -> torch.cuda.Event:
        """Queue copies between blocks and rows of `images`; the event is behind all of them."""
        row_bytes = _aligned(run.nbytes)
        at_once = self._halves.shape[1] // row_bytes
        streams = self._sent(run, blocks)
        if after is not None:  # it is the kernel that reads or writes blocks
            self._kernels.wait_event(after)
        first, second = (self._kernels, self._copies) if to_host else (self._copies, self._kernels)
        for at in range(0, len(blocks), at_once):
            piece, half = slice(at, at + at_once), self._next
            staged = self._halves[half, : at_once * row_bytes].view(at_once, row_bytes)
            there = _addresses(images, slots[piece], run.start)
            rows = _addresses(staged, range(len(there)))
            if (left := self._left[half]) is not None:
                first.wait_event(left)
            if to_host:
                self._launch(streams, piece, staged, to_host)
                second.wait_stream(first)
                copy_all(rows, there, run.nbytes, self._copies)
            else:
                copy_all(there, rows, run.nbytes, self._copies)
                second.wait_stream(first)
                self._launch(streams, piece, staged, to_host)
            self._left[half] = second.record_event()
            self._next = 1 - half
        event = torch.cuda.Event(blocking=True)
        event.record(second)
        return event

    def _sent(self, run: StreamRun, blocks: Sequence[Any]) -> list[tuple[AlikeStreams, Tensor]]:
        """For the kernel: a run's streams by their kind, and where the blocks' tokens lie there."""
        if run not in self._kinds:
            self._kinds[run] = kinds_of(run)
        here = np.asarray(blocks, dtype=np.int64)
        with torch.cuda.stream(self._kernels):
            return [
                (kind, _to_device(kind.token_offsets(here), self._kernels.device))
                for kind in self._kinds[run]
            ]

    def _launch(
        self,
        streams: Sequence[tuple[AlikeStreams, Tensor]],
        piece: slice,
        staged: Tensor,
        to_host: bool,
    ) -> None:
        with torch.cuda.stream(self._kernels):
            for kind, offsets in streams:
                move_streams(kind, offsets[piece], staged, to_host)


def kinds_of(run: StreamRun) -> list[AlikeStreams]:
    """What the kernel is told of a run's streams; images are staged from its start on."""
    views = [stream.view for stream in run.streams]
    return alike(views, [stream.start - run.start for stream in run.streams], run.block_size)


def _to_device(values: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _addresses(images: Tensor, rows: Sequence[int], start: int = 0) -> npt.NDArray[np.uint64]:
    return np.asarray(rows, dtype=np.uint64) * images.stride(0) + (images.data_ptr() + start)
