"""The memory of one connection, in which block images change hands.

    image 0 | image 1 | …        each from the start of a page
    header 0 | header 1 | …

The server makes it as a file without a name and passes the file over the socket, so that nothing
is left of it when both ends are gone, in whatever way they went. Its size is sealed: an end that
cut it would kill the other, which has it mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from quire.kv.tiers.shared.protocol import Shape

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = npt.NDArray[np.uint8]


class Exchange:
    """Room for a batch of values."""

    def __init__(self, file: int, shape: Shape) -> None:
        """Over the memory of `file`, which may be closed afterwards."""
        if os.fstat(file).st_size != size_of(shape):
            raise OSError("the memory of a connection has another size than it should")
        everything = np.frombuffer(mmap.mmap(file, size_of(shape)), dtype=np.uint8)
        images = shape.batch * shape.stride
        heads = images + shape.batch * shape.head_bytes
        self._images = everything[:images].reshape(shape.batch, shape.stride)
        self._heads = everything[images:heads].reshape(shape.batch, shape.head_bytes)

    def image(self, at: int, size: int) -> Bytes:
        row: Bytes = self._images[at, :size]
        return row

    def head(self, at: int) -> Bytes:
        row: Bytes = self._heads[at]
        return row


def size_of(shape: Shape) -> int:
    return shape.batch * (shape.stride + shape.head_bytes)


def make_file(shape: Shape) -> int:
    """The file of an exchange: zeros, which take memory as they are first written."""
    file = os.memfd_create("quire-exchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size_of(shape))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file
