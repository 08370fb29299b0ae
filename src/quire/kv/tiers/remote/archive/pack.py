"""Packs: the values of several blocks in one object of megabytes, whose name says which they are.

    <root>/<key size key size …>     root: 16 hex digits; key: 8 bytes; size: 4 bytes; base64

The values lie one behind the other, in the order of the name. So the names alone are the index: a
listing is enough to know what there is, without a lock, a database or a read of any object. A key
in a name is cut short; each value still has its header with the whole of it, compared on loading.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

_ENTRY = struct.Struct(">QI")
_NAME = re.compile(r"[0-9a-f]{16}/[0-9A-Za-z_-]+")
MOST_BLOCKS = 15  # a file's name has at most 255 characters
PACK_BYTES = 8 << 20  # a pack is full with so many


class Span(NamedTuple):
    """Bytes of an object."""

    start: int
    size: int


def short_key(key: str) -> int:
    """What packs' names have of a key of the store."""
    return int(key[-64:-48], 16)


def root_folder(root: bytes) -> str:
    """Where the packs of one namespace and tenant are."""
    return root[:8].hex()


def pack_name(folder: str, keys: Sequence[int], sizes: Sequence[int]) -> str:
    packed = b"".join(_ENTRY.pack(key, size) for key, size in zip(keys, sizes, strict=True))
    return f"{folder}/{base64.urlsafe_b64encode(packed).decode()}"


def read_name(name: str) -> dict[int, Span] | None:
    """Where the value of each key is; None if this is no pack's name."""
    if not _NAME.fullmatch(name):
        return None
    try:
        packed = base64.urlsafe_b64decode(name[17:])
    except binascii.Error:
        return None
    if not packed or len(packed) % _ENTRY.size:
        return None
    keys, sizes = zip(*_ENTRY.iter_unpack(packed), strict=True)
    starts = accumulate(sizes, initial=0)
    return {key: Span(start, size) for key, start, size in zip(keys, starts, sizes, strict=False)}


def packed_bytes(name: str) -> int:
    spans = read_name(name)
    return sum(span.size for span in spans.values()) if spans else 0


def cut_into_packs(sizes: Sequence[int]) -> Iterator[slice]:
    """Values of these sizes, in packs of a good size."""
    start = filled = 0
    for at, size in enumerate(sizes):
        if at - start == MOST_BLOCKS or (filled and filled + size > PACK_BYTES):
            yield slice(start, at)
            start, filled = at, 0
        filled += size
    if start < len(sizes):
        yield slice(start, len(sizes))
