"""Small arrays to the device and results back, without waiting for it.

Copies from and to pinned memory are queued like kernels. Such memory may be dropped at once; it is
kept until what uses it is done: by torch, if that is a copy of its own, else by `small_copy.py`.

Copies are made by the GPU's copy engines, which cost the host least. Where an engine moves
gigabytes of KV between host and device, small copies would wait behind those; there, kernels make
them. What a recorded step begins with kernels always read themselves, which takes less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_ALIGNMENT = 64  # bytes: kernels read aligned arrays faster, and are compiled for them apart


_DTYPES = {np.dtype(np.int32).char: torch.int32, np.dtype(np.int64).char: torch.int64}


@dataclass(frozen=True)
class HostLink:
    """How a runner's small arrays get to its device and back; on a CPU nothing is copied."""

    by_kernels: bool = False  # instead of by the GPU's copy engines

    def to_device(self, values: Array | Sequence[Any], device: torch.device) -> Tensor:
        """One array; a list becomes what torch makes of it."""
        tensor = torch.as_tensor(values)
        if device.type != "cuda":
            return tensor
        return self._send(tensor.contiguous().pin_memory(), device)

    def all_to_device(self, arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
        """Several arrays in one copy."""
        if device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        starts = np.cumsum([0, *sizes]).tolist()
        staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        host = staging.numpy()
        for start, array in zip(starts, arrays, strict=False):
            host[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        packed = self._send(staging, device)
        return [
            packed[start : start + array.nbytes].view(_DTYPES[array.dtype.char]).view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]

    def fetch(self, tensor: Tensor) -> Fetch:
        """Begin to copy a tensor to the host."""
        if not tensor.is_cuda:
            return Fetch(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self.by_kernels:
            from quire.kernels.triton.small_copy import small_copy

            return Fetch(host, small_copy(tensor.contiguous(), host, host))
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Fetch(host, done)

    def _send(self, pinned: Tensor, device: torch.device) -> Tensor:
        if not self.by_kernels:
            return pinned.to(device, non_blocking=True)
        from quire.kernels.triton.small_copy import small_copy

        there = torch.empty(pinned.shape, dtype=pinned.dtype, device=device)
        small_copy(pinned, there, pinned)
        return there


BY_COPY_ENGINES = HostLink()


@contextmanager
def staged(count: int, target: Tensor) -> Iterator[Array]:
    """Memory to fill with the first `count` items of a device's tensor; sent at the end."""
    staging = torch.empty(count, dtype=target.dtype, pin_memory=target.is_cuda)
    yield staging.numpy()
    if target.is_cuda:
        from quire.kernels.triton.small_copy import small_copy

        small_copy(staging, target[:count], staging)
    else:
        target[:count].copy_(staging)


@contextmanager
def read_by_kernels(count: int, device: torch.device) -> Iterator[Tensor]:
    """So many int32 of the host's memory, to fill and then to give to kernels, which read them
    there; they are kept until the kernels are done."""
    host = torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
    yield host
    if device.type == "cuda":
        from quire.kernels.triton.small_copy import kept_until_done

        kept_until_done(host)


def told_by_kernels(host: Tensor, *read: Tensor) -> Fetch:
    """What kernels that are queued write into the host's pinned memory themselves. It is kept until
    they are done, and so is what they `read` there."""
    if not host.is_pinned():
        return Fetch(host)
    from quire.kernels.triton.small_copy import kept_until_done

    return Fetch(host, kept_until_done(host, *read))


class Mark:
    """A point in what is queued on a device."""

    def __init__(self, device: torch.device) -> None:
        self._reached = torch.cuda.Event() if device.type == "cuda" else None
        if self._reached is not None:
            self._reached.record()

    def wait(self) -> None:
        if self._reached is not None:
            self._reached.synchronize()


class Fetch:
    """A tensor on its way to the host; `done` is behind the copy, if there is one."""

    def __init__(self, host: Tensor, done: torch.cuda.Event | None = None) -> None:
        self._host = host
        self._done = done

    def wait(self) -> Array:
        """Its values, as soon as they are here; work queued behind them is not waited for."""
        if self._done is not None:
            self._done.synchronize()
        values: Array = self._host.numpy()
        return values
