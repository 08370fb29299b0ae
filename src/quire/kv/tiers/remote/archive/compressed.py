"""Values with compressed images; `pip install 'quire[zstd]'`.

The bytes of a number differ in how random they are: those of a bfloat16 are an exponent, much the
same in all of an image, and a mantissa, which is noise. So an image is split into planes, one for
each byte of a number, before it is compressed. How wide a number is, is tried out on a part of it.

    header, as it is | number of planes, one byte | zstd frame of the planes, one behind the other

A value that would not become smaller is stored as it is. The two are told apart by their sizes.
"""

from __future__ import annotations

import numpy as np
import zstandard

from quire.kv.tiers.remote.archive.codec import Codec
from quire.kv.tiers.remote.archive.objects import Bytes
from quire.kv.tiers.remote.client import Value

WIDTHS = (1, 2, 4)
_TRIED = 64 << 10  # bytes from the middle of an image that the number of planes is chosen by


class Compressed(Codec):
    """Reads compressed values and others; writes compressed ones if it `compresses`."""

    def __init__(self, head_bytes: int, compresses: bool, level: int = 1) -> None:
        self._head_bytes, self._compresses, self._level = head_bytes, compresses, level

    def pack(self, raw: bytes, sizes: list[int]) -> tuple[bytes, list[int]]:
        if not self._compresses:
            return raw, sizes
        zstd = zstandard.ZstdCompressor(level=self._level)  # not to be shared by threads
        parts: list[Bytes] = []
        stored: list[int] = []
        rest = memoryview(raw)
        for size in sizes:
            value, rest = rest[:size], rest[size:]
            head, image = value[: self._head_bytes], value[self._head_bytes :]
            planes = _best_width(zstd, image)
            frame = zstd.compress(split(image, planes))
            smaller: list[Bytes] = [head, bytes([planes]), frame]
            chosen: list[Bytes] = smaller if sum(map(len, smaller)) < size else [value]
            parts += chosen
            stored.append(sum(map(len, chosen)))
        return b"".join(parts), stored

    def unpack(self, stored: Bytes, value: Value) -> int:
        if len(stored) >= len(value) or len(stored) <= len(value.head):
            return super().unpack(stored, value)
        middle = len(value.head)
        planes, size = stored[middle], len(value.image)
        try:
            frame = memoryview(stored)[middle + 1 :]
            if zstandard.frame_content_size(frame) != size or planes not in WIDTHS:
                return len(stored)
            image = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError:
            return len(stored)
        value.head[:] = stored[:middle]
        join(image, planes, value.image)
        return len(value)


def split(image: Bytes, planes: int) -> Bytes:
    """The first bytes of all numbers, then all second ones, …; a remainder stays at the end."""
    if planes == 1:
        return image
    data = np.frombuffer(image, np.uint8)
    whole = len(data) // planes * planes
    out = np.empty_like(data)
    for at in range(planes):  # one after the other: as one transposition it is four times as slow
        out[:whole].reshape(planes, -1)[at] = data[at:whole:planes]
    out[whole:] = data[whole:]
    return out.data


def join(planes_of: Bytes, planes: int, image: memoryview) -> None:
    """The inverse of `split`, into `image`."""
    data, out = np.frombuffer(planes_of, np.uint8), np.frombuffer(image, np.uint8)
    whole = len(data) // planes * planes
    for at in range(planes):
        out[at:whole:planes] = data[:whole].reshape(planes, -1)[at]
    out[whole:] = data[whole:]


def _best_width(zstd: zstandard.ZstdCompressor, image: memoryview) -> int:
    start = max(0, len(image) - _TRIED) // 2 // 4 * 4
    tried = image[start : start + _TRIED]
    return min(WIDTHS, key=lambda width: len(zstd.compress(split(tried, width))))
