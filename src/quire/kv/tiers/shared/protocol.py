"""What an engine and the cache's server say to each other, on a stream of frames.

    engine ── hello: JSON, the shape of its blocks ──────────────────▶ server
           ◀── WELCOME, with the file of the connection's memory; or
               REFUSED, and a frame that says why ───────────────────

    engine ── an operation's byte, then keys or names ───────────────▶ server
           ◀── a byte for each of them ───────────────────────────────

Block images are not in the stream: each connection has memory of its own that both ends see
(`exchange`). Names have all their parts, since a key alone finds a block but does not prove that
it is the one that was asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeGuard

from quire.errors import QuireError
from quire.kv.image import KEY_BYTES, LAYOUT_VERSION, NO_TENANT, BlockName, header_bytes
from quire.kv.tiers.tier import PAGE

VERSION = 1
MOST_KEYS = 65_536  # in one frame
MOST_FRAME_BYTES = 4 << 20
MOST_IMAGE_BYTES = 1 << 30
MOST_BLOCK_SIZE = 1 << 16
MOST_GROUPS = 256  # a group's number is a byte
BATCH_BYTES = 16 << 20  # of images in a connection's memory: enough for full speed

WELCOME, REFUSED = b"W", b"R"

_NAME = struct.Struct("<32s32s32s16sB")
SECONDS = struct.Struct("<d")
COUNT = struct.Struct("<Q")


class ProtocolError(QuireError):
    """A message that makes no sense. The connection is closed; nothing else happens."""


class Operation(IntEnum):
    ASK = 1  # keys: which of them are held
    USE = 2  # keys: a request asked for these
    READ = 3  # names: put their images into the memory; which of them are there now
    WRITE = 4  # names, whose images are in the memory: which of them are held now
    CHECK = 5  # keys: what came was wrong, so drop those that are not whole
    STATS = 6  # nothing: JSON
    PIN = 7  # seconds and keys: how many of them stay for so long, as 8 bytes
    DELETE = 8  # keys: how many of them there were, as 8 bytes
    DELETE_ROOTS = 9  # a tenant and roots: the same of all their blocks
    LIST = 10  # nothing: JSON, how many blocks there are of each root


@dataclass(frozen=True)
class Shape:
    """Which blocks: their tokens, and the bytes of the images of each KV group."""

    block_size: int
    image_bytes: tuple[int, ...]

    @property
    def most_bytes(self) -> int:
        return max(self.image_bytes)

    @property
    def stride(self) -> int:
        """From one image in memory to the next."""
        return -(-self.most_bytes // PAGE) * PAGE

    @property
    def head_bytes(self) -> int:
        return header_bytes(self.block_size)

    @property
    def batch(self) -> int:
        """Blocks that one call moves at most."""
        most = (MOST_FRAME_BYTES - 1) // (_NAME.size + 4 * self.block_size)
        return max(1, min(BATCH_BYTES // self.stride, most))

    def hello(self) -> dict[str, Any]:
        sizes = list(self.image_bytes)
        version = {"version": VERSION, "layout": LAYOUT_VERSION}
        return version | {"block_size": self.block_size, "image_bytes": sizes}

    @classmethod
    def of_hello(cls, hello: Any) -> Shape:
        if not isinstance(hello, dict) or "image_bytes" not in hello:
            raise ProtocolError("a client did not begin with a hello")
        spoken = hello.get("version"), hello.get("layout")
        if spoken != (VERSION, LAYOUT_VERSION):
            raise ProtocolError(
                "the engine and the cache's server are of different versions of Quire; "
                "run the same one"
            )
        block_size, sizes = hello.get("block_size"), hello["image_bytes"]
        is_list = isinstance(sizes, list) and 0 < len(sizes) <= MOST_GROUPS
        if (
            not is_list
            or not _is_whole(block_size, MOST_BLOCK_SIZE)
            or block_size & (block_size - 1)
            or not all(_is_whole(size, MOST_IMAGE_BYTES) for size in sizes)
        ):
            raise ProtocolError("a client's hello has no sizes of blocks")
        return cls(block_size, tuple(sizes))

    def pack(self, names: Sequence[BlockName]) -> bytes:
        return b"".join(
            _NAME.pack(name.key, name.parent, name.root, name.tenant, name.group) + name.tokens
            for name in names
        )

    def unpack(self, body: memoryview) -> list[BlockName]:
        """Names, as many as a call moves at most."""
        size = _NAME.size + 4 * self.block_size
        if len(body) % size or len(body) // size > self.batch:
            raise ProtocolError(f"{len(body):,} bytes are not the names of a batch")
        names = []
        for at in range(0, len(body), size):
            key, parent, root, tenant, group = _NAME.unpack_from(body, at)
            if group >= len(self.image_bytes):
                raise ProtocolError(f"there is no KV group {group}")
            tokens = bytes(body[at + _NAME.size : at + size])
            names.append(BlockName(key, parent, root, tokens, tenant, group))
        return names


def unpack_keys(body: memoryview) -> list[bytes]:
    if len(body) % KEY_BYTES:
        raise ProtocolError(f"{len(body):,} bytes are not keys")
    return [bytes(body[at : at + KEY_BYTES]) for at in range(0, len(body), KEY_BYTES)]


def unpack_pin(body: memoryview) -> tuple[float, list[bytes]]:
    """For how many seconds, and which keys."""
    if len(body) < SECONDS.size:
        raise ProtocolError("a pin has no time")
    (seconds,) = SECONDS.unpack_from(body)
    if not 0 < seconds < float("inf"):
        raise ProtocolError(f"a pin of {seconds} seconds makes no sense")
    return seconds, unpack_keys(body[SECONDS.size :])


def unpack_roots(body: memoryview) -> tuple[bytes, list[bytes]]:
    """A tenant, and roots."""
    if len(body) < len(NO_TENANT):
        raise ProtocolError("roots to be deleted are of no tenant")
    return bytes(body[: len(NO_TENANT)]), unpack_keys(body[len(NO_TENANT) :])


def _is_whole(value: Any, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= most
