"""A block image outside the process: its bytes, behind a header that says whose they are.

    magic, version | image bytes, tokens | checksum of the image | key | parent | root | token ids

The header follows from the block's name and its image alone, so a block that was asked for is
right when the header that comes with it is, byte for byte, the one that it should have.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple

import xxhash

_HEAD = struct.Struct("<8sIIQ32s32s32s")
MAGIC = b"quireKV\x01"
KEY_BYTES = 32
NO_TENANT = bytes(16)
LAYOUT_VERSION = 1  # images outlive processes: raise it when the order of their bytes changes


class BlockName(NamedTuple):
    """Which block it is: its key, and all that the key was made from; and whose it is."""

    key: bytes
    parent: bytes  # the key before it in its sequence, or the namespace's root
    root: bytes  # the namespace's
    tokens: bytes  # its token ids, as little-endian int32
    tenant: bytes = NO_TENANT  # whose share of a tier it takes; no part of what the block is
    group: int = 0  # its KV group, which the key is made from; images of each have their size


class HeldBlock(NamedTuple):
    """A block as its tier knows it, which need not know its tokens."""

    key: bytes
    parent: bytes
    root: bytes
    tenant: bytes


class Verdict(Enum):
    """What became of a block that was looked for; all but the first are dropped and counted."""

    WHOLE = "whole"
    ABSENT = "absent"
    TORN = "torn"  # no header, or not all the bytes
    FOREIGN = "foreign"  # the bytes of another block
    CORRUPT = "corrupt"  # its own bytes, changed


def header_bytes(block_size: int) -> int:
    return _HEAD.size + 4 * block_size


def header(name: BlockName, image: memoryview) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(image)
    return _pack(name, len(image), checksum)


def examine(name: BlockName, head: bytes | memoryview, image: memoryview) -> Verdict:
    """Whether `head` and `image` are those of the block `name`."""
    if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
        return Verdict.TORN
    size, _, checksum, *_ = _HEAD.unpack_from(head)[1:]
    if size != len(image):
        return Verdict.TORN
    if bytes(head) != _pack(name, size, checksum):
        return Verdict.FOREIGN
    right = xxhash.xxh3_64_intdigest(image) == checksum
    return Verdict.WHOLE if right else Verdict.CORRUPT


def size_in(head: bytes | memoryview) -> int:
    """How many bytes the image has, as this header says."""
    size: int = _HEAD.unpack_from(head)[1]
    return size


def name_in(head: bytes | memoryview) -> BlockName | None:
    """Whose header it says it is; None where it is no header. Only `examine` can tell the truth."""
    if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
        return None
    tokens, _, key, parent, root = _HEAD.unpack_from(head)[2:]
    end = _HEAD.size + 4 * tokens
    return BlockName(key, parent, root, bytes(head[_HEAD.size : end]))


def _pack(name: BlockName, size: int, checksum: int) -> bytes:
    fields = (MAGIC, size, len(name.tokens) // 4, checksum, name.key, name.parent, name.root)
    return _HEAD.pack(*fields) + name.tokens
