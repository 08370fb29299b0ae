"""Small arrays to the device and results back, without waiting for it.

Copies from and to pinned memory are queued like kernels. Such memory may be dropped at once; it is
kept until the copies that use it are done.

Copies are made by the GPU's copy engines, which cost the host least. Where gigabytes of KV move
between host and device, they would wait behind those; there, kernels make them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_ALIGNMENT = 64  # bytes: kernels read aligned arrays faster, and are compiled for them apart


def to_device(values: Array | Sequence[Any], device: torch.device) -> Tensor:
    """One array; a list becomes what torch makes of it."""
    tensor = torch.as_tensor(values)
    if device.type != "cuda":
        return tensor
    return _to_device(tensor.contiguous().pin_memory(), device)


_engines_are_busy = False


def avoid_copy_engines() -> None:
    """KV is going to be moved in this process."""
    global _engines_are_busy
    _engines_are_busy = True


def _to_device(pinned: Tensor, device: torch.device) -> Tensor:
    if not _engines_are_busy:
        return pinned.to(device, non_blocking=True)
    from quire.kernels.triton.small_copy import small_copy

    there = torch.empty(pinned.shape, dtype=pinned.dtype, device=device)
    small_copy(pinned, there, pinned)
    return there


def all_to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Several arrays in one copy."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = np.cumsum([0, *sizes]).tolist()
    staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    host = staging.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    packed = _to_device(staging, device)
    return [
        packed[start : start + array.nbytes].view(_DTYPES[array.dtype.char]).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


@contextmanager
def staged(count: int, target: Tensor) -> Iterator[Array]:
    """Memory to fill with the first `count` items of a tensor of the device; sent at the end."""
    staging = torch.empty(count, dtype=target.dtype, pin_memory=target.is_cuda)
    yield staging.numpy()
    if target.is_cuda and _engines_are_busy:
        from quire.kernels.triton.small_copy import small_copy

        small_copy(staging, target[:count], staging)
    else:
        target[:count].copy_(staging, non_blocking=True)


_DTYPES = {np.dtype(np.int32).char: torch.int32, np.dtype(np.int64).char: torch.int64}


class Fetch:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._done = self._begin(tensor)

    def _begin(self, tensor: Tensor) -> torch.cuda.Event:
        if _engines_are_busy:
            from quire.kernels.triton.small_copy import small_copy

            return small_copy(tensor.contiguous(), self._host, self._host)
        self._host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self) -> Array:
        """Its values, as soon as they are here; work queued behind them is not waited for."""
        if self._done is not None:
            self._done.synchronize()
        values: Array = self._host.numpy()
        return values
