"""vLLM's KV tensors as streams of a `LayerPool`.

A part of an image has a tensor's values in the order of its logical dimensions, whatever their
strides are: so blocks in one physical order (NHD) and another (HND) have the same images. What
those dimensions mean is vLLM's affair, so the version of vLLM is part of the blocks' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from quire.errors import ConfigError
from quire.kv import LayerPool


def layer_streams(tensor: Tensor, block_dim: int, num_blocks: int) -> list[Tensor]:
    """A layer's streams, `[blocks, tokens, heads, width]` or whatever its own dimensions are.

    Where attention kernels have smaller blocks than vLLM's allocator, several of them are one.
    """
    size = tensor.shape[block_dim]
    if size % num_blocks:
        raise ConfigError(
            f"A KV tensor of shape {list(tensor.shape)} has no {num_blocks:,} blocks in dimension "
            f"{block_dim}; Quire's connector does not know this layout of vLLM."
        )
    by_block = tensor.movedim(block_dim, 0)
    if size > num_blocks:
        by_block = by_block.unflatten(0, (num_blocks, -1))
    while by_block.dim() < 4:
        by_block = by_block.unsqueeze(1)
    streams = [by_block]
    while streams[0].dim() > 4:  # a pool's streams have three dimensions behind that of blocks
        streams = [part for stream in streams for part in stream.unbind(1)]
    return [stream.transpose(1, 2) for stream in streams]


def layer_pool(
    caches: Mapping[str, Tensor],
    block_dims: Mapping[str, int],
    num_blocks: int,
    groups: Sequence[Sequence[str]],
) -> LayerPool:
    """A pool over the layers of each KV group; layers that share the KV of another of their group
    have none of their own. Layers of different groups may lie in the same memory."""
    layers: list[list[Tensor]] = []
    numbers: list[list[int]] = []
    for names in groups:
        own = {caches[name].data_ptr(): name for name in reversed(names)}
        numbers.append([])
        for name in [name for name in names if name in own.values()]:
            numbers[-1].append(len(layers))
            layers.append(layer_streams(caches[name], block_dims[name], num_blocks))
    pool = LayerPool(layers, numbers)
    pool.tokens_of_block = None  # vLLM's dimension there may be heads, or a part of a block
    return pool


def describe(
    caches: Mapping[str, Tensor], block_dims: Mapping[str, int], groups: Sequence[Sequence[str]]
) -> str:
    """What the bytes of images depend on: the layers' logical shapes, without their blocks."""
    return "; ".join(_describe(caches, block_dims, names) for names in groups)


def _describe(
    caches: Mapping[str, Tensor], block_dims: Mapping[str, int], names: Sequence[str]
) -> str:
    shapes = []
    for name in names:
        shape = [*caches[name].shape]
        del shape[block_dims[name]]
        shapes.append(f"{block_dims[name]}:{'x'.join(map(str, shape))}")
    return f"{len(shapes)} of {shapes[0]}" if len(set(shapes)) == 1 else ", ".join(shapes)
