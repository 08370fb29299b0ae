"""Blocks to put into tiers: their names, and memory for their images as tiers want it."""

from __future__ import annotations

import mmap

import numpy as np

from quire.kv.image import BlockName
from quire.kv.keys import block_key
from quire.kv.tiers.tier import PAGE

BLOCK_SIZE = 16


def chain(count: int, salt: int = 0) -> list[BlockName]:
    """The blocks of one prompt; another prompt, in another namespace, for every salt."""
    root = salt.to_bytes(32, "little")
    names, parent = [], root
    for at in range(count):
        tokens = np.arange(BLOCK_SIZE, dtype="<i4") + 1000 * at
        key = block_key(parent, tokens.tolist())
        names.append(BlockName(key, parent, root, tokens.tobytes()))
        parent = key
    return names


def keys(names: list[BlockName]) -> list[bytes]:
    return [name.key for name in names]


def empty(count: int, image_bytes: int) -> list[memoryview]:
    """Page-aligned buffers, as long as an image rounded up to whole pages."""
    size = -(-image_bytes // PAGE) * PAGE
    memory = memoryview(mmap.mmap(-1, count * size))
    return [memory[at * size : (at + 1) * size] for at in range(count)]


def filled(count: int, image_bytes: int, seed: int = 0) -> list[memoryview]:
    random = np.random.default_rng(seed)
    images = empty(count, image_bytes)
    for image in images:
        image[:image_bytes] = random.bytes(image_bytes)
    return images


def image_of(name: BlockName, image_bytes: int) -> memoryview:
    """The one image that belongs to this block: another process makes the same."""
    return filled(1, image_bytes, seed=int.from_bytes(name.key[:8], "little"))[0]


def same(images: list[memoryview], others: list[memoryview], image_bytes: int) -> bool:
    return all(
        image[:image_bytes] == other[:image_bytes]
        for image, other in zip(images, others, strict=True)
    )
