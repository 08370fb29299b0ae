"""Tensors that are still in their files: only the part that is asked for is read.

A row of a matrix is a run of blocks: of single numbers, or of as many as were quantised together.
A part by rows is one run of bytes. A part by columns is one run in each row, of all the blocks that
the columns touch:

    row     [ block 0 │ block 1 │ block 2 │ block 3 ]
    columns           ╰─────────╯                       one run of bytes, nothing else
    columns      ╰────────────────╯                     three blocks are read, and cut
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ModelError
from quire.layers.weights import ranges

Slices = tuple[slice, ...]
Bytes = NDArray[np.uint8]


class LazyTensor(Protocol):
    """What weights are loaded from; a tensor in memory is one, too."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, part: Slices, /) -> Tensor: ...


class TensorFile:
    """A file that several threads may read from; it counts the bytes of tensors they read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._lock = threading.Lock()

    def read(self, start: int, row_bytes: int, rows: range, columns: range) -> Bytes:
        """A rectangle of bytes out of the rows of `row_bytes` that begin at `start`."""
        whole_rows = len(columns) == row_bytes
        shape = (1, len(rows) * row_bytes) if whole_rows else (len(rows), len(columns))
        found = np.empty(shape, np.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                for i, run in enumerate(found):
                    file.seek(start + (rows.start + i) * row_bytes + columns.start)
                    self._fill(run.data, file.readinto)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror or error}.") from None
        with self._lock:
            self.bytes_read += found.nbytes
        return found.reshape(len(rows), len(columns))

    def _fill(self, run: memoryview, read_into: Callable[[memoryview], int | None]) -> None:
        while len(run):  # the system reads at most 2 GiB at a time
            count = read_into(run)
            if not count:
                raise ModelError(
                    f"{self.path} became shorter while it was read: download it again."
                )
            run = run[count:]


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: `[part]` reads that part of it, and `[()]` all of it."""

    file: TensorFile
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_values: int
    block_bytes: int
    decode: Callable[[Bytes], Tensor]  # rows of whole blocks into rows of numbers
    name: str = ""  # that the file has it under

    def __getitem__(self, part: Slices) -> Tensor:
        if not self.shape:
            return replace(self, shape=(1,))[()][0]
        *leading, columns = ranges(self.shape, part)
        if not all((*leading, columns)):
            return torch.empty([len(each) for each in (*leading, columns)], dtype=self.dtype)
        if len(leading) > 1:
            return torch.stack([self._inner(i)[part[1:]] for i in leading[0]])
        rows = leading[0] if leading else range(1)
        first, last = columns.start // self.block_values, -(-columns.stop // self.block_values)
        run = range(first * self.block_bytes, last * self.block_bytes)
        row_bytes = self.shape[-1] // self.block_values * self.block_bytes
        numbers = self.decode(self.file.read(self.start, row_bytes, rows, run))
        skipped = columns.start - first * self.block_values
        found = numbers[:, skipped : skipped + len(columns)]
        return found if leading else found[0]

    def _inner(self, index: int) -> FileTensor:
        """One of the tensors along the first dimension."""
        shape = self.shape[1:]
        size = math.prod(shape) // self.block_values * self.block_bytes
        return replace(self, start=self.start + index * size, shape=shape)


def as_stored(dtype: torch.dtype) -> Callable[[Bytes], Tensor]:
    """Decodes numbers that lie in the file as they are in memory."""
    return lambda raw: torch.from_numpy(raw).view(dtype)
