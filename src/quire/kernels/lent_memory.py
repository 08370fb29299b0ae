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
SPARE = 2  # times what was asked for a piece may be, and times what was needed at once all may be


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of any numbers, on the CPU."""
    shape = torch.Size(shape)
    size = shape.numel() * dtype.itemsize
    if size < LARGE or _get_current_dispatch_mode() is not None:  # which makes tensors itself
        return torch.empty(shape, dtype=dtype)
    return _of_thread.pieces.empty(size, shape, dtype)


def lend(
    piece: Tensor, shape: torch.Size, dtype: torch.dtype, take_back: Callable[[Tensor], None]
) -> Tensor:
    """A tensor at the beginning of `piece`, a tensor of bytes, which is taken back in the end."""
    lent = (ctypes.c_char * piece.nbytes).from_address(piece.data_ptr())
    weakref.finalize(lent, take_back, piece).atexit = False
    return torch.frombuffer(lent, dtype=dtype, count=shape.numel()).view(shape)


def give_back() -> None:
    """Have the system have all that is kept and free, of every thread."""
    with _changing:
        everyone = list(_all)
    for pieces in everyone:
        pieces.give_back()


class _Pieces:
    """What a thread has made, by address. Any thread may be the one that gives a piece back."""

    def __init__(self) -> None:
        self.free: dict[int, Tensor] = {}
        self._lent: dict[int, int] = {}  # sizes
        self._most = 0  # bytes lent at once
        with _changing:
            _all.add(self)

    def empty(self, size: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        piece = self._taken(size)
        if piece is None:
            self._make_room(size)
            piece = torch.empty(size, dtype=torch.uint8)
        self._lent[piece.data_ptr()] = piece.nbytes
        self._most = max(self._most, self._bytes_lent())
        return lend(piece, shape, dtype, self._take_back)

    def give_back(self) -> None:
        self.free.clear()
        self._most = self._bytes_lent()

    def _taken(self, size: int) -> Tensor | None:
        """The smallest free piece that fits."""
        by_size = sorted((piece.nbytes, place) for place, piece in list(self.free.items()))
        for held, place in by_size:
            if size <= held <= SPARE * size:
                piece = self.free.pop(place, None)
                if piece is not None:
                    return piece
        return None

    def _make_room(self, size: int) -> None:
        """For one piece more; those that are free for longest make way."""
        lent = self._bytes_lent() + size
        allowed = SPARE * max(self._most, lent) - lent
        kept = list(self.free.items())
        free = sum(piece.nbytes for _, piece in kept)
        for place, piece in kept:
            if free <= allowed:
                return
            self.free.pop(place, None)
            free -= piece.nbytes

    def _bytes_lent(self) -> int:
        return sum(list(self._lent.values()))

    def _take_back(self, piece: Tensor) -> None:
        place = piece.data_ptr()
        del self._lent[place]
        self.free[place] = piece


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.pieces = _Pieces()


_changing = threading.Lock()
_all: weakref.WeakSet[_Pieces] = weakref.WeakSet()
_of_thread = _OfThread()
