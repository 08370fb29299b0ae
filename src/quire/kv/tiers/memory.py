"""Memory for images on the host: page-aligned, and pinned where a GPU is to reach it.

Pinning tens of gigabytes takes seconds, and no request should wait for it: it is done in pieces
in a thread, and slots are handed out as the piece they are in is ready. CUDA blocks other
calls while it pins; most of that time goes into untouched pages, so they are touched before.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import ConfigError
from quire.host_memory import free_host_memory
from quire.kv.tiers.tier import PAGE

if TYPE_CHECKING:
    import torch

log = logging.getLogger("quire")

PIECE_BYTES = 512 << 20
TOUCHING_THREADS = 4


def check_free(host_cache_bytes: int) -> None:
    """Refuse more than the machine has left."""
    free = free_host_memory()
    if host_cache_bytes > free:
        raise ConfigError(
            f"host_cache_bytes={host_cache_bytes:,} is more than the {free:,} bytes of memory that "
            "are free; lower it."
        )


class HostMemory:
    """`num_slots` images, each at the start of a page.

    The memory of a `file` without a name can be that of several processes, each of which has one of
    these over it; those that are `guest` in it leave what is there as it is.
    """

    def __init__(
        self,
        image_bytes: int,
        num_slots: int,
        pinned: bool,
        file: int = -1,
        guest: bool = False,
    ) -> None:
        self.image_bytes = image_bytes
        self.num_slots = num_slots
        self.stride = -(-image_bytes // PAGE) * PAGE
        self.nbytes = num_slots * self.stride
        self._piece = max(1, PIECE_BYTES // self.stride)  # slots that are pinned at once
        size = max(self.nbytes, PAGE)
        if file >= 0:
            os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)  # takes memory as it is first written
        flat = np.frombuffer(self._map, dtype=np.uint8)[: self.nbytes]
        self._rows = flat.reshape(num_slots, self.stride)
        self._view = memoryview(self._map)
        self._pinned = pinned
        self._guest = guest
        self._num_pinned = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @cached_property
    def images(self) -> torch.Tensor:
        """All slots, to copy from and to a device. Without one there is no need of torch, which
        takes seconds to import."""
        import torch

        return torch.from_numpy(self._rows)

    def buffer(self, slot: int) -> memoryview:
        """A slot's bytes, up to the end of its last page."""
        start = slot * self.stride
        return self._view[start : start + self.stride]

    def image(self, slot: int) -> memoryview:
        return self.buffer(slot)[: self.image_bytes]

    def make_ready(self, ready: Callable[[range], None]) -> None:
        """Tell `ready` of all slots, piece by piece as they can be used."""
        if not self._pinned:
            ready(range(self.num_slots))
            return
        name = "quire pinning"
        self._thread = threading.Thread(target=self._pin, args=(ready,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether all slots that there will be can be used."""
        return self._thread is None or not self._thread.is_alive()

    def _pin(self, ready: Callable[[range], None]) -> None:
        from quire.kv.cuda_copies import spare_recordings

        spare_recordings()  # another engine over this cache may be recording its steps now
        for first in range(0, self.num_slots, self._piece):
            piece = range(first, min(first + self._piece, self.num_slots))
            if self._closed or not self._register(piece):
                return
            self._num_pinned = piece.stop
            ready(piece)

    def _register(self, piece: range) -> bool:
        import torch

        from quire.kv.cuda_copies import forget_error

        if not self._guest:
            parts = self._rows[piece.start : piece.stop].reshape(-1)
            try:
                with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
                    for part in np.array_split(parts, TOUCHING_THREADS):
                        threads.submit(part.fill, 0)
            except RuntimeError:  # the process ends, which gives no work to threads any more
                return False
        address = self.images.data_ptr() + piece.start * self.stride
        error = torch.cuda.cudart().cudaHostRegister(address, len(piece) * self.stride, 0)
        if int(error) != 0:
            forget_error()
            log.warning("No more than %d images of the host cache could be pinned.", piece.start)
            return False
        return True

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join()  # it would pin memory that is about to go
        if self._num_pinned:
            self._unregister()

    def _unregister(self) -> None:
        import torch

        for first in range(0, self._num_pinned, self._piece):
            torch.cuda.cudart().cudaHostUnregister(self.images.data_ptr() + first * self.stride)
        self._num_pinned = 0
