"""Tensors of a CPU in memory that is kept: when the last view of one is gone, it is free again.

The tensors of a long prompt are more than the system's allocator keeps. It would ask for the same
memory anew for every kernel, whose pages are zeroed at their first touch, one after another: for
2,048 tokens 500,000 of them, in which sixteen threads wait for each other.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

LARGE = 4 << 20  # bytes


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of any numbers, on the CPU."""
    shape = torch.Size(shape)
    size = shape.numel() * dtype.itemsize
    if size < LARGE or _get_current_dispatch_mode() is not None:  # which makes tensors itself
        return torch.empty(shape, dtype=dtype)
    return _kept.empty(size, shape, dtype)


def lend(
    piece: Tensor, shape: torch.Size, dtype: torch.dtype, take_back: Callable[[Tensor], None]
) -> Tensor:
    """A tensor at the beginning of `piece`, a tensor of bytes, which is taken back in the end."""
    lent = (ctypes.c_char * piece.nbytes).from_address(piece.data_ptr())
    weakref.finalize(lent, take_back, piece).atexit = False
    return torch.frombuffer(lent, dtype=dtype, count=shape.numel()).view(shape)


class _Kept(threading.local):
    """The pieces that a thread has made: never more than it needed at once. Any thread may be the
    one that gives a piece back."""

    def __init__(self) -> None:
        self.free: dict[int, Tensor] = {}

    def empty(self, size: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        by_size = sorted((piece.nbytes, place) for place, piece in list(self.free.items()))
        fitting = [place for held, place in by_size if held >= size]
        if fitting:
            piece = self.free.pop(fitting[0])
        else:
            if by_size:  # in whose place a larger one is made
                del self.free[by_size[-1][1]]
            piece = torch.empty(size, dtype=torch.uint8)
        return lend(piece, shape, dtype, _Return(self.free))


class _Return:
    """Puts pieces where a thread looks for them, from whatever thread this is."""

    def __init__(self, free: dict[int, Tensor]) -> None:
        self._free = free

    def __call__(self, piece: Tensor) -> None:
        self._free[piece.data_ptr()] = piece


_kept = _Kept()
