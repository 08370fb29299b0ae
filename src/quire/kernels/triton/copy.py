"""Copying block images, all layers at once: a block is one contiguous range of the pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import cdiv

_WIDTH = 4096


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """One launch for all copies, in no order: no block may be both a source and a target."""
    if len(sources) == 0:
        return
    size = cache[0].numel()
    grid = (cdiv(size, _WIDTH), len(sources))
    strides = cache.stride(0), sources.stride(0), targets.stride(0)
    _copy[grid](cache, sources, targets, *strides, size, WIDTH=_WIDTH)


@triton.jit
def _copy(
    cache,
    sources,
    targets,
    block_stride,
    source_stride,
    target_stride,
    size,
    WIDTH: tl.constexpr,
):
    copy = tl.program_id(1)
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    live = lane < size
    source = cache + tl.load(sources + copy * source_stride) * block_stride
    target = cache + tl.load(targets + copy * target_stride) * block_stride
    tl.store(target + lane, tl.load(source + lane, mask=live), mask=live)
