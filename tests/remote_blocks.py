"""Blocks as remote stores hold them, for tests."""

from __future__ import annotations

from quire.kv.image import LAYOUT_VERSION, BlockName, header_bytes

IMAGE_BYTES = 100_000
VALUE_BYTES = header_bytes(16) + IMAGE_BYTES


def stored_key(name: BlockName) -> str:
    return f"quire:{LAYOUT_VERSION}:{name.key.hex()}"
