"""Pools of every layout over the same values: block-major, a tensor a layer, token slots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random

import torch
from torch import Tensor

from quire.kv import ImagePool, LayerPool, SlotPool, streams_of
from quire.kv.pools.block_pool import BlockPool

LAYOUTS = ("images", "layers", "slots")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = (torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Shape:
    """What engines of different layouts agree upon."""

    num_layers: int = 3
    num_streams: int = 2
    heads: int = 2
    width: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float16


@dataclass(frozen=True)
class LaidOut:
    """A pool, and its streams: of each layer views `[blocks, tokens, heads, width]`."""

    pool: BlockPool
    streams: list[tuple[Tensor, ...]]
    rows: list  # what each block is when it is given to a store

    def values(self, blocks: list[int]) -> Tensor:
        """The bytes of blocks, one behind the other, in the order of an image."""
        parts = [
            _integers(stream)[blocks].transpose(1, 2).flatten(1).contiguous().view(torch.uint8)
            for layer in self.streams
            for stream in layer
        ]
        return torch.cat(parts, dim=1).cpu()

    def blocks(self, blocks: list[int]) -> list:
        return [self.rows[block] for block in blocks]


def lay_out(kind: str, shape: Shape, num_blocks: int, random: Random, device="cpu") -> LaidOut:
    """A pool full of random bytes, whose strides and order of dimensions are random, too."""
    if kind == "images":
        return _block_major(shape, num_blocks, random, device)
    if kind == "slots":
        return _slots(shape, num_blocks, random, device)
    layers = [_layer(shape, num_blocks, random, device) for _ in range(shape.num_layers)]
    return LaidOut(LayerPool(layers), layers, list(range(num_blocks)))


def _block_major(shape: Shape, num_blocks: int, random: Random, device: str) -> LaidOut:
    sizes = (shape.num_layers, shape.num_streams, shape.heads, shape.block_size, shape.width)
    kv = _random((num_blocks, *sizes), shape.dtype, random, device)
    streams = [kv[:, layer].permute(1, 0, 3, 2, 4).unbind(0) for layer in range(shape.num_layers)]
    pool = ImagePool(kv.view(num_blocks, -1).view(torch.uint8))
    return LaidOut(pool, streams, list(range(num_blocks)))


def _layer(shape: Shape, num_blocks: int, random: Random, device: str) -> tuple[Tensor, ...]:
    """A layer's tensor with its dimensions in any order, as a slice of a larger one."""
    sizes = {
        "kv": shape.num_streams,
        "block": num_blocks,
        "token": shape.block_size,
        "head": shape.heads,
        "width": shape.width,
    }
    order = random.sample(list(sizes), len(sizes))
    spare = {name: random.choice((0, 0, 1)) for name in order}
    kv = _random([sizes[name] + spare[name] for name in order], shape.dtype, random, device)
    kv = kv[tuple(slice(spare[name], None) for name in order)]
    return streams_of(kv, " ".join(order))


def _slots(shape: Shape, num_blocks: int, random: Random, device: str) -> LaidOut:
    num_slots = num_blocks * shape.block_size
    size = (num_slots, shape.heads, shape.width)
    layers = [
        tuple(_random(size, shape.dtype, random, device) for _ in range(shape.num_streams))
        for _ in range(shape.num_layers)
    ]
    slots = torch.tensor(random.sample(range(num_slots), num_slots)).view(num_blocks, -1)
    streams = [tuple(_Slots(stream, slots) for stream in layer) for layer in layers]
    return LaidOut(SlotPool(layers, shape.block_size), streams, slots.tolist())


def _integers(stream: Tensor | _Slots) -> Tensor | _Slots:
    """Not every device can index every dtype."""
    return stream.view(INTEGERS[stream.itemsize]) if isinstance(stream, Tensor) else stream


@dataclass(frozen=True)
class _Slots:
    """A stream that is indexed with blocks."""

    stream: Tensor
    slots: Tensor

    def __getitem__(self, blocks: list[int]) -> Tensor:
        return self.stream.view(torch.uint8)[self.slots[blocks]]


def _random(size, dtype: torch.dtype, random: Random, device: str) -> Tensor:
    numbers = torch.Generator().manual_seed(random.randrange(1 << 40))
    width = size[-1] * dtype.itemsize
    made = torch.randint(256, (*size[:-1], width), dtype=torch.uint8, generator=numbers)
    return made.to(device).view(dtype)


ALL_PAIRS = list(product(LAYOUTS, LAYOUTS))
