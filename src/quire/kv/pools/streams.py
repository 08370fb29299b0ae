"""Streams of KV in an engine's own tensors: views that say where each token's values lie.

    a stream    [blocks, tokens of a block, heads, width]    one layer's keys, or values, or latents
    its part of an image     [heads, tokens, width]          packed, as in the block-major pool
    an image    layer 0's streams, layer 1's streams, …      one part behind the other

Which dimension is which is said by the engine: with two KV heads `[2, blocks, …]` and `[blocks, 2,
…]` can have the same shape, so a shape tells nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.checks import shown
from quire.errors import ConfigError
from quire.kv.arguments import check_device
from quire.kv.pools.overlaps import find_overlap

DIMENSIONS = ("kv", "block", "token", "head", "width")

# Values are moved, never computed with; and not every dtype can be indexed on every device.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def streams_of(tensor: Tensor, dims: str) -> tuple[Tensor, ...]:
    """The streams of a layer's tensor, whose dimensions are named in their order.

    As in `streams_of(kv, "kv block token head width")`: `kv` counts the streams, keys first, and
    may be left out where there is one; so may `head`.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"Streams are those of a tensor, not of a {type(tensor).__name__}.")
    names = dims.split() if isinstance(dims, str) else []
    needed = set(DIMENSIONS) - {"kv", "head"}
    if len(set(names)) < len(names) or not needed <= set(names) <= set(DIMENSIONS):
        raise ConfigError(
            f"dims={dims!r} does not name the dimensions of a layer; give each of "
            f"{', '.join(DIMENSIONS)} once, in the tensor's order (kv and head may be left out)."
        )
    if len(names) != tensor.dim():
        raise ConfigError(
            f"dims={dims!r} names {len(names)} dimensions of a tensor of shape "
            f"{list(tensor.shape)}; give one name for each."
        )
    for missing in [name for name in ("kv", "head") if name not in names]:
        names.append(missing)
        tensor = tensor.unsqueeze(-1)
    return tensor.permute([names.index(name) for name in DIMENSIONS]).unbind(0)


@dataclass(frozen=True)
class Stream:
    """Its values, and where its part of an image begins.

    `view` is `[blocks, tokens, heads, width]`, or `[slots, heads, width]` where each token has a
    slot; either, indexed with what a block is to its pool, gives `[tokens, heads, width]`.
    """

    view: Tensor
    start: int  # in bytes
    nbytes: int  # of its part


@dataclass(frozen=True, eq=False)
class StreamRun:
    """Streams whose parts of an image are side by side: those of a KV group, or of a layer."""

    streams: tuple[Stream, ...]
    block_size: int

    @property
    def start(self) -> int:
        """In bytes of an image."""
        return self.streams[0].start

    @property
    def nbytes(self) -> int:
        last = self.streams[-1]
        return last.start + last.nbytes - self.start

    def gather(self, blocks: Sequence[Any], images: Tensor, slots: Sequence[int]) -> None:
        """Copy blocks into rows of `images`: what a GPU's kernel has to do, in torch."""
        index, rows = torch.tensor(blocks), torch.tensor(slots)
        for stream in self.streams:
            values = stream.view[index].transpose(1, 2).flatten(1)
            images[rows, stream.start : stream.start + stream.nbytes] = values.view(torch.uint8)

    def scatter(self, images: Tensor, slots: Sequence[int], blocks: Sequence[Any]) -> None:
        """Copy rows of `images` into blocks."""
        index, rows = torch.tensor(blocks), torch.tensor(slots)
        for stream in self.streams:
            part = images[rows, stream.start : stream.start + stream.nbytes]
            shape = (stream.view.shape[-2], self.block_size, stream.view.shape[-1])
            values = part.view(stream.view.dtype).unflatten(1, shape)
            stream.view[index] = values.transpose(1, 2)


def lay_out(layers: Sequence[Sequence[Tensor]], block_size: int) -> list[StreamRun]:
    """The streams of an image's layers, one layer's behind the other's."""
    runs: list[StreamRun] = []
    start = 0
    for tensors in layers:
        streams = []
        for tensor in tensors:
            heads, width = tensor.shape[-2:]
            nbytes = block_size * heads * width * tensor.itemsize
            streams.append(Stream(tensor.view(_AS_INTEGERS[tensor.itemsize]), start, nbytes))
            start += nbytes
        runs.append(StreamRun(tuple(streams), block_size))
    return runs


def joined(runs: Sequence[StreamRun]) -> StreamRun:
    """Runs one behind the other as one."""
    return StreamRun(tuple(each for run in runs for each in run.streams), runs[0].block_size)


def check_streams(layers: Sequence[Sequence[Tensor]], dims: int, shape: str) -> None:
    """Whether these can be the streams of a pool; all agree in their first dimensions."""
    tensors = _streams_in(layers)
    if not layers or not all(layers):
        raise ConfigError("A pool needs a layer, and each layer a stream; give their tensors.")
    first = tensors[0]
    check_device(first.device)
    for tensor in tensors:
        if tensor.dim() != dims or not tensor.numel():
            raise ConfigError(
                f"A stream of {list(tensor.shape)} is none of {shape}; give views of that shape."
            )
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ConfigError(
                f"Streams are of one dtype on one device, not {first.dtype} on {first.device} and "
                f"{tensor.dtype} on {tensor.device}."
            )
        if tensor.shape[: dims - 2] != first.shape[: dims - 2]:
            raise ConfigError(
                f"Streams of {list(first.shape)} and {list(tensor.shape)} differ in more than "
                f"heads and width; give {shape} of the same blocks."
            )
        if _overlaps_itself(tensor):
            raise ConfigError(
                f"A stream with strides of {list(tensor.stride())} has several values at one "
                "place; give a view of memory of its own."
            )


def _streams_in(layers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Those of all layers: a tensor by itself would be taken apart at its first dimension."""
    is_nested = isinstance(layers, Sequence) and all(isinstance(each, Sequence) for each in layers)
    tensors = [tensor for layer in layers for tensor in layer] if is_nested else []
    if not is_nested or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ConfigError(
            "A pool is made of a list of layers, each a list of its streams; give "
            'streams_of(kv, "kv block token head width") for the tensor of each layer.'
        )
    return tensors


def check_groups(layers: Sequence[Sequence[Tensor]], groups: Sequence[Sequence[int]]) -> None:
    """Whether every group has layers, and no two of its streams share memory."""
    if not isinstance(groups, Sequence) or not groups:
        raise ConfigError("A pool needs a KV group at least; leave groups out for one of all.")
    numbers = range(len(layers))
    for layers_of_group in groups:
        is_list = isinstance(layers_of_group, Sequence) and len(layers_of_group) > 0
        if not is_list or not all(at in numbers for at in layers_of_group):
            raise ConfigError(
                f"A KV group of layers {shown(layers_of_group)} cannot be: give numbers of the "
                f"{len(layers)} layers, one at least."
            )
        _check_apart(layers, layers_of_group)
    if left_out := set(numbers).difference(*groups):
        raise ConfigError(
            f"Layer {min(left_out)} is in no KV group, so that nothing would keep it; give each "
            "layer a group."
        )


def _check_apart(layers: Sequence[Sequence[Tensor]], group: Sequence[int]) -> None:
    """Within a group: layers of different groups may share memory, as their blocks differ."""
    owners = [at for at in group for _ in layers[at]]
    overlap = find_overlap([tensor for at in group for tensor in layers[at]])
    if overlap is not None:
        one, other = (owners[at] for at in overlap)
        raise ConfigError(
            f"Streams of layers {one} and {other} of one KV group have values at the same place; "
            "give each memory of its own."
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether a larger stride does not pass over all that smaller ones reach: never, for any view
    that slicing and permuting an ordinary tensor makes."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
