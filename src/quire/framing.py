"""Messages on a byte stream between two processes: each is a frame, its length and then its bytes.

    4 bytes, little endian: n | n bytes, JSON in all but the ranks' arrays

Never pickle: what another process sends is data, and cannot run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any

LENGTH = struct.Struct("<I")

encode_json = json.JSONEncoder(separators=(",", ":")).encode  # made once


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def pack(message: Any) -> bytes:
    """A frame of JSON."""
    return frame(encode_json(message).encode())


def read_frame(read: Callable[[int], bytes], most: int | None = None) -> bytes:
    """The bytes of the next frame; `read(n)` returns n bytes or raises.

    A frame of more than `most` bytes is a ValueError before it is read.
    """
    size = LENGTH.unpack(read(LENGTH.size))[0]
    if most is not None and size > most:
        raise ValueError(f"a frame has {size:,} bytes, which is more than {most:,}")
    return read(size)


def read_frame_from(file: IO[bytes], most: int | None = None) -> bytes:
    """The same from a buffered file; EOFError where it ends, be it within a frame."""

    def read(count: int) -> bytes:
        data = file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    return read_frame(read, most)


class FrameReader:
    """Bytes as they come in, cut into messages of JSON; for readers that must not wait."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are whole now."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH.size:
            body = start + LENGTH.size
            end = body + LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            yield json.loads(buffer[body:end])
            start = end
        del buffer[:start]
