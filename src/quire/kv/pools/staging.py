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

STAGING_BYTES = 64 << 20
ALIGNMENT = 16


class Staging:
    """One direction: its CUDA stream, and the buffer that one piece after another goes through."""

    def __init__(self, stream: torch.cuda.Stream, image_bytes: int) -> None:
        self._stream = stream
        size = max(STAGING_BYTES, _aligned(image_bytes))
        self._buffer = torch.empty(size, dtype=torch.uint8, device=stream.device)
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
        staged = self._buffer[: len(self._buffer) // row_bytes * row_bytes].view(-1, row_bytes)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for at in range(0, len(blocks), len(staged)):
                piece = slice(at, at + len(staged))
                here = np.asarray(blocks[piece], dtype=np.int64)
                there = _addresses(images, slots[piece], run.start)
                rows = _addresses(staged, range(len(here)))
                if to_host:
                    self._launch(run, here, staged, to_host)
                    copy_all(rows, there, run.nbytes, self._stream)
                else:
                    copy_all(there, rows, run.nbytes, self._stream)
                    self._launch(run, here, staged, to_host)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return event

    def _launch(
        self, run: StreamRun, blocks: npt.NDArray[np.int64], staged: Tensor, to_host: bool
    ) -> None:
        if run not in self._kinds:
            self._kinds[run] = kinds_of(run)
        for kind in self._kinds[run]:
            offsets = torch.from_numpy(kind.token_offsets(blocks)).pin_memory()
            move_streams(kind, offsets.to(staged.device, non_blocking=True), staged, to_host)


def kinds_of(run: StreamRun) -> list[AlikeStreams]:
    """What the kernel is told of a run's streams; images are staged from its start on."""
    views = [stream.view for stream in run.streams]
    return alike(views, [stream.start - run.start for stream in run.streams], run.block_size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _addresses(images: Tensor, rows: Sequence[int], start: int = 0) -> npt.NDArray[np.uint64]:
    return np.asarray(rows, dtype=np.uint64) * images.stride(0) + (images.data_ptr() + start)
