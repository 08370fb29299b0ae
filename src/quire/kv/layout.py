"""The shape of a block image: the same bytes in every tier.

    a row of the pool    [ values: layer 0 (K, V), layer 1 (K, V), … | scales of fp8 | padding ]
                           └──────────────── the image of one block ────────────────┘

Latents in fp8 have their scales beside them (`kernels/fp8.py`).

A block belongs to one KV group and holds a few tokens of that group's layers, each stream packed
by head. The widest group fills the row; the padding of the others is never moved or stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from quire.kernels.fp8 import FP8, SCALE, latent_bytes
from quire.kv.room import STEPS_AHEAD, longest_sequence, most_held
from quire.kv_groups import KVGroup, KVStream


@dataclass(frozen=True)
class StreamPlace:
    """Where a layer's stream lies in the rows of its group; both places are in bytes."""

    stream: KVStream
    values: int  # `[heads, block_size, width]`
    scales: int | None  # float32 `[heads, block_size]`; None where values need no scales


@dataclass(frozen=True)
class KVLayout:
    """How blocks of every group lie in rows of one size."""

    groups: tuple[KVGroup, ...]
    block_size: int
    dtype: torch.dtype
    rotated: torch.dtype = torch.bfloat16  # of what stays as it is beside latents in fp8

    @classmethod
    def plain(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> KVLayout:
        """K and V of all layers in one group, as most models have them."""
        group = KVGroup.keys_and_values(range(num_layers), num_kv_heads, head_dim)
        return cls((group,), block_size, dtype)

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        assert layers == list(range(len(layers))), "every layer is in one group"

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Which group each layer is in."""
        found = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found[layer] for layer in range(len(found)))

    # --- bytes ------------------------------------------------------------------------------------

    @cached_property
    def token_bytes(self) -> int:
        """KV of one token, over all groups, without padding."""
        return sum(self._token_bytes(group) for group in self.groups)

    @cached_property
    def image_bytes(self) -> tuple[int, ...]:
        """The size of one block's image, for each group."""
        return tuple(self._token_bytes(group) * self.block_size for group in self.groups)

    @cached_property
    def block_bytes(self) -> int:
        """A row of the pool: the room of one block, whatever group takes it."""
        return max(self.image_bytes)

    @cached_property
    def places(self) -> tuple[tuple[StreamPlace, ...], ...]:
        """Where each layer's streams lie in the rows of its group."""
        found = {layer: places for group in self.groups for layer, places in self._places(group)}
        return tuple(found[layer] for layer in range(len(found)))

    @cached_property
    def is_replicated(self) -> bool:
        """Whether all ranks of a model hold the same bytes: latents belong to all heads."""
        return all(stream.rank is not None for group in self.groups for stream in group.streams)

    @cached_property
    def shape_name(self) -> str:
        """What the bytes of images depend on; one group of equal streams is named as ever."""
        if len(self.groups) == 1 and len(set(self.groups[0].streams)) == 1:
            (group,), stream = self.groups, self.groups[0].streams[0]
            sizes = (len(group.layers), len(group.streams), stream.heads, stream.width)
            return "x".join(map(str, sizes))
        return "; ".join(map(_group_name, self.groups))

    def _token_bytes(self, group: KVGroup) -> int:
        streams = [self.value_bytes(s) + s.heads * self._scale_bytes(s) for s in group.streams]
        return len(group.layers) * sum(streams)

    def value_bytes(self, stream: KVStream) -> int:
        """What a token takes in the place of a stream's values."""
        if stream.rank is not None and self.dtype == FP8:  # scales are among them
            return latent_bytes(stream.rank, stream.width - stream.rank, self.rotated)
        return stream.heads * stream.width * self.dtype.itemsize

    def _scale_bytes(self, stream: KVStream) -> int:
        return SCALE.itemsize if self.dtype == FP8 and stream.rank is None else 0

    def _places(self, group: KVGroup) -> Iterator[tuple[int, tuple[StreamPlace, ...]]]:
        values = 0
        scales = len(group.layers) * sum(map(self.value_bytes, group.streams)) * self.block_size
        for layer in group.layers:
            places = []
            for stream in group.streams:
                has_scales = self._scale_bytes(stream) > 0
                places.append(StreamPlace(stream, values, scales if has_scales else None))
                values += self.block_size * self.value_bytes(stream)
                scales += self.block_size * stream.heads * self._scale_bytes(stream)
            yield layer, tuple(places)

    # --- blocks -----------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks of one group that so many tokens fill."""
        return -(-tokens // self.block_size)

    def most_table_blocks(self, group: int, tokens: int, step_tokens: int) -> int:
        """The most blocks a sequence of up to `tokens` ever holds in one group.

        A window's blocks are given back when a step of up to `step_tokens` is committed.
        """
        ahead = STEPS_AHEAD * step_tokens
        return most_held(tokens, self.windows[group], self.block_size, ahead)

    def most_blocks(self, tokens: int, step_tokens: int) -> int:
        """The most blocks a sequence of up to `tokens` ever holds, over all groups."""
        numbers = range(len(self.groups))
        return sum(self.most_table_blocks(g, tokens, step_tokens) for g in numbers)

    def longest_sequence(self, num_blocks: int, step_tokens: int, most: int) -> int:
        """The most tokens, up to `most`, of a sequence that a pool of so many blocks can hold."""
        ahead = STEPS_AHEAD * step_tokens
        return longest_sequence(num_blocks, self.windows, self.block_size, ahead, most)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)


def _group_name(group: KVGroup) -> str:
    layers = ",".join(map(str, group.layers))
    streams = "+".join(f"{stream.heads}x{stream.width}" for stream in group.streams)
    return f"layers {layers} of {streams}, window {group.window}"
