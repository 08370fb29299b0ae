"""Pools whose values lie in streams: a tensor a layer with blocks, or with token slots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kv.arguments import check_block_size, checked_blocks, checked_slots
from quire.kv.pools.block_pool import Block, BlockPool, Blocks, Transfer
from quire.kv.pools.streams import StreamRun, check_groups, check_streams, joined, lay_out

if TYPE_CHECKING:
    from quire.kv.pools.staging import Staging

# Bytes of an image that are worth a copy of their own. Measured on an H200: a copy takes the copy
# engine 2.5 µs at least, so that layers of 64 KiB, one by one, come at half the rate of the bus.
FEWEST_COPIED = 256 << 10

Layers = Sequence[Sequence[Tensor]]  # of each layer its streams: keys and values, or latents


class StreamPool(BlockPool[Block]):
    """Copies between streams and images, for every KV group."""

    def __init__(
        self, layers: Layers, groups: Sequence[Sequence[int]], num_blocks: int, block_size: int
    ) -> None:
        check_groups(layers, groups)
        runs = [lay_out([layers[at] for at in group], block_size) for group in groups]
        device = layers[0][0].device
        fewest = FEWEST_COPIED if device.type == "cuda" else 0
        self._layers = [_together(of_group, fewest) for of_group in runs]
        self._groups = [joined(of_group) for of_group in runs]
        super().__init__(device, num_blocks, [run.nbytes for run in self._groups])
        self.block_size = self.tokens_of_block = block_size
        self.num_layers = len(groups[0])
        self._staging_out = self._open_staging(self._outward)
        self._staging_in = self._open_staging(self._inward)

    def to_host(
        self,
        blocks: Sequence[Block],
        images: Tensor,
        slots: Sequence[int],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        began, run = time.perf_counter(), self._groups[group]
        if self._staging_out is not None:
            event = self._staging_out.move(run, blocks, images, slots, after, to_host=True)
            return Transfer(event, began)
        run.gather(blocks, images, slots)
        return Transfer(seconds=time.perf_counter() - began)

    def from_host(
        self,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[Block],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Transfer:
        return self._scatter(self._groups[group], images, slots, blocks, after)

    def from_host_by_layer(
        self,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[Block],
        after: torch.cuda.Event | None = None,
        group: int = 0,
    ) -> Iterator[Transfer]:
        for run, num_layers in self._layers[group]:
            transfer = self._scatter(run, images, slots, blocks, after)
            yield from [transfer] * num_layers

    def _scatter(
        self,
        run: StreamRun,
        images: Tensor,
        slots: Sequence[int],
        blocks: Sequence[Block],
        after: torch.cuda.Event | None,
    ) -> Transfer:
        began = time.perf_counter()
        if self._staging_in is not None:
            event = self._staging_in.move(run, blocks, images, slots, after, to_host=False)
            return Transfer(event, began)
        run.scatter(images, slots, blocks)
        return Transfer(seconds=time.perf_counter() - began)

    def _open_staging(self, stream: torch.cuda.Stream | None) -> Staging | None:
        if stream is None:
            return None
        from quire.kv.pools.staging import Staging  # Triton is for GPUs

        return Staging(stream, self.block_bytes)


def _together(layers: Sequence[StreamRun], fewest: int) -> list[tuple[StreamRun, int]]:
    """Runs of layers with so many bytes of an image at least, and how many layers each has."""
    steps: list[tuple[StreamRun, int]] = []
    waiting: list[StreamRun] = []
    for layer in layers:
        waiting.append(layer)
        if layer is layers[-1] or sum(run.nbytes for run in waiting) >= fewest:
            steps.append((joined(waiting), len(waiting)))
            waiting = []
    return steps


class LayerPool(StreamPool[int]):
    """A tensor a layer, or several, with the block dimension anywhere, as in vLLM.

        LayerPool([streams_of(kv, "kv block token head width") for kv in kv_caches])

    Each stream is a view `[num_blocks, block_size, heads, width]` with any strides. `groups` has
    the numbers of the layers of each KV group's images; without, there is one group of all layers.
    """

    def __init__(self, layers: Layers, groups: Sequence[Sequence[int]] | None = None) -> None:
        check_streams(layers, 4, "[num_blocks, block_size, heads, width]")
        num_blocks, block_size = layers[0][0].shape[:2]
        every = [range(len(layers))] if groups is None else groups
        super().__init__(layers, every, num_blocks, block_size)

    def checked(self, blocks: Blocks) -> list[int]:
        return checked_blocks(blocks, self.num_blocks)


class SlotPool(StreamPool[tuple[int, ...]]):
    """Token slots a layer, as in SGLang: each token of a block may lie anywhere.

    Each stream is a view `[num_slots, heads, width]` with any strides. Where a store asks for
    blocks, give a row of `block_size` slots for each: `slots.view(-1, block_size)`. An engine whose
    blocks are slots side by side can have a `LayerPool` over `[blocks, block_size, heads, width]`.
    """

    def __init__(self, layers: Layers, block_size: int) -> None:
        check_streams(layers, 3, "[num_slots, heads, width]")
        check_block_size(block_size)
        self.num_slots = layers[0][0].shape[0]
        num_blocks = self.num_slots // block_size
        if not num_blocks:
            raise ConfigError(
                f"{self.num_slots:,} slots hold no block of {block_size:,} tokens; give more slots."
            )
        super().__init__(layers, [range(len(layers))], num_blocks, block_size)

    def checked(self, blocks: Blocks) -> list[tuple[int, ...]]:
        return checked_slots(blocks, self.num_slots, self.block_size)
