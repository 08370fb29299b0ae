"""Types whose bits are moved within a block when it is loaded, to where fewer instructions find
them.

Both have numbers of six bits, of which files have some bits in one place and some in another. In
memory four of them are three bytes: each has one in its lower six bits, and above it two bits of
the fourth, the lowest in the first byte.

    Q3_K   file     third bits of codes │ lower two │ scales │ d
           memory   codes, two to six bits │ scales │ d
    Q6_K   file     lower four bits of codes │ upper two │ scales │ d
           memory   codes │ scales │ d

Bits are moved between bytes of one row. So blocks may be those of one row or of sixteen that are
interleaved, and each operation is done on as many bytes as fit into a word; what a shift brings
from the byte beside it is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[Any]

AT_ONCE = 1 << 18  # bytes: what they become on the way stays in the cache


class Parts:
    """Blocks `[blocks, bytes]`, each of one row, or of some that are interleaved."""

    def __init__(self, blocks: Bytes, rows: int) -> None:
        self._blocks, self._rows = blocks, rows
        self._word = np.dtype(np.uint64 if rows % 8 == 0 else np.uint16)
        self._ones = int.from_bytes(b"\1" * self._word.itemsize, "little")

    def __call__(self, start: int, stop: int, *shape: int) -> Words:
        """Bytes `start` to `stop` of each block, as a view `[blocks, *shape, words]`."""
        part = self._blocks[:, start * self._rows : stop * self._rows].view(self._word)
        return part.reshape(len(part), *shape, -1)

    def all(self, byte: int) -> int:
        """A word of this byte alone."""
        return self._ones * byte

    def shifts(self, step: int) -> Words:
        """0, `step`, … below the bits of a byte, for the last axis but one."""
        return np.arange(0, 8, step, dtype=self._word)[:, None]


class Moves(NamedTuple):
    """From blocks as the file has them to blocks as memory has them, and back."""

    to_memory: Callable[[Parts, Parts], None]
    to_file: Callable[[Parts, Parts], None]


def move(change: Callable[[Parts, Parts], None], blocks: Bytes, rows: int) -> None:
    """Change blocks `[blocks, bytes]` of so many rows each, where they are."""
    some = max(1, AT_ONCE // blocks.shape[1])
    for start in range(0, len(blocks), some):
        part = blocks[start : start + some]
        change(Parts(part.copy(), rows), Parts(part, rows))


def _q3_to_memory(file: Parts, memory: Parts) -> None:
    every = file.all
    third = file(0, 32, 1) >> file.shifts(2)
    lower = (file(32, 96, 2, 1) >> file.shifts(4)).reshape(third.shape)
    codes = lower & every(0x03) | lower << 1 & every(0x18)
    codes |= third << 2 & every(0x04) | third << 4 & every(0x20)
    _store_threes(memory, 0, 96, codes.reshape(len(codes), 4, 4, -1))
    upper = file(104, 108, 1) >> file.shifts(2)
    lower = (file(96, 104, 1) >> file.shifts(4)).reshape(upper.shape)
    _store_threes(memory, 96, 108, (lower & every(0x0F) | upper << 4 & every(0x30))[:, None])
    memory(108, 110)[:] = file(108, 110)


def _q3_to_file(memory: Parts, file: Parts) -> None:
    every = file.all
    codes = _sixes(memory, 0, 96, 4)
    codes = codes.reshape(len(codes), 4, -1)
    third = codes >> 2 & every(0x01) | codes >> 4 & every(0x02)
    file(0, 32)[:] = np.bitwise_or.reduce(third << file.shifts(2), axis=1)
    lower = codes & every(0x03) | codes >> 1 & every(0x0C)
    file(32, 96, 2)[:] = lower[:, ::2] | lower[:, 1::2] << 4
    scales = _sixes(memory, 96, 108, 1)[:, 0]
    lower, upper = scales & every(0x0F), scales >> 4 & every(0x03)
    file(96, 104, 2)[:] = lower[:, :2] | lower[:, 2:] << 4
    file(104, 108)[:] = np.bitwise_or.reduce(upper << file.shifts(2), axis=1)
    file(108, 110)[:] = memory(108, 110)


def _q6_to_memory(file: Parts, memory: Parts) -> None:
    every, low, high = file.all, file(0, 128, 2, 2), file(128, 192, 2)
    even, odd = low[:, :, 0], low[:, :, 1]
    first, second, third = np.moveaxis(memory(0, 192, 2, 3), 2, 0)
    first[:] = even & every(0x0F) | high << 4 & every(0x30) | odd << 2 & every(0xC0)
    second[:] = odd & every(0xCF) | high << 2 & every(0x30)
    third[:] = even >> 4 & every(0x0F) | high & every(0xF0)
    memory(192, 210)[:] = file(192, 210)


def _q6_to_file(memory: Parts, file: Parts) -> None:
    every, low, high = file.all, file(0, 128, 2, 2), file(128, 192, 2)
    first, second, third = np.moveaxis(memory(0, 192, 2, 3), 2, 0)
    low[:, :, 0] = first & every(0x0F) | third << 4 & every(0xF0)
    low[:, :, 1] = second & every(0xCF) | first >> 2 & every(0x30)
    high[:] = first >> 4 & every(0x03) | second >> 2 & every(0x0C) | third & every(0xF0)
    file(192, 210)[:] = memory(192, 210)


def _store_threes(memory: Parts, start: int, stop: int, sixes: Words) -> None:
    """Numbers of six bits `[blocks, groups, 4, words]` as three bytes of four."""
    threes = memory(start, stop, sixes.shape[1], 3)
    for i in range(3):
        threes[:, :, i] = sixes[:, :, i] | sixes[:, :, 3] << 6 - 2 * i & memory.all(0xC0)


def _sixes(memory: Parts, start: int, stop: int, groups: int) -> Words:
    """The inverse of `_store_threes`."""
    threes, every = memory(start, stop, groups, 3), memory.all
    first, second, third = np.moveaxis(threes, 2, 0)
    fourth = first >> 6 & every(0x03) | second >> 4 & every(0x0C) | third >> 2 & every(0x30)
    return np.concatenate((threes & every(0x3F), fourth[:, :, None]), axis=2)


MOVES = {"Q3_K": Moves(_q3_to_memory, _q3_to_file), "Q6_K": Moves(_q6_to_memory, _q6_to_file)}
