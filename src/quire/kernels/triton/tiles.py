"""What the attention kernels share: a tile of paged KV, and its part in a running softmax.

A softmax over a long row is built tile by tile: `top` is the largest score so far, `total` the sum
of `2 ** (score - top)`, and `acc` the values weighted the same way. A new tile with a larger score
scales the old sums down to the new `top`. Scores are in units of log 2, since exp2 is what the
hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


def tile_tokens(pages: Tensor, most: int) -> int:
    """Tokens per tile, so that a tile of K takes at most 32 KiB."""
    row_bytes = head_width(pages) * pages.element_size()
    return max(16, min(most, 32768 // row_bytes))


def head_width(pages: Tensor) -> int:
    """The head's size as tensor cores take it: a power of two, 16 at least."""
    return max(16, int(triton.next_power_of_2(pages.shape[-1])))


@triton.jit
def find_blocks(table, positions, end, BLOCK_SIZE: tl.constexpr):
    """The block of each position. Loops ask for the next tile's while they load this one's: the
    compiler then sees no load that waits for another, and keeps more of them under way."""
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


def scale_arguments(pages: Tensor, scales: Tensor | None) -> tuple[Tensor | int, ...]:
    """What a kernel takes for the scales of fp8: pointer, and strides of blocks, K or V, heads.

    Other pages have none; a kernel that is told so does not look.
    """
    return (pages, 0, 0, 0) if scales is None else (scales, *scales.stride()[:3])


@triton.jit
def load_tile(
    head_pages,
    blocks,
    positions,
    live,
    block_stride,
    kv_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
):
    """K and V of these positions, `[tokens, head_width]`; what is not live is 0, never read."""
    starts = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride
    dims = tl.arange(0, HEAD_WIDTH)
    pointers = head_pages + starts[:, None] + dims[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(pointers, mask=mask, other=0.0)
    v = tl.load(pointers + kv_stride, mask=mask, other=0.0)
    return k, v


@triton.jit
def load_scales(
    head_scales,
    blocks,
    positions,
    live,
    scale_block_stride,
    scale_kv_stride,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """What K and V of these positions are to be multiplied by, if they are in fp8."""
    if SCALED:
        at = head_scales + blocks.to(tl.int64) * scale_block_stride + positions % BLOCK_SIZE
        k_scale = tl.load(at, mask=live, other=0.0)
        v_scale = tl.load(at + scale_kv_stride, mask=live, other=0.0)
    else:  # nobody looks at them
        k_scale = live.to(tl.float32)
        v_scale = k_scale
    return k_scale, v_scale


@triton.jit
def in_common(x, SCALED: tl.constexpr):
    """A query as it is multiplied with fp8: what that is turned into with one instruction."""
    if SCALED and x.dtype == tl.bfloat16:
        x = x.to(tl.float16)
    return x


@triton.jit
def absorb(
    q,
    k,
    v,
    k_scale,
    v_scale,
    seen,
    scale,
    top,
    total,
    acc,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Add a tile to the running softmax. float32 is multiplied exactly, not as tf32.

    The scales of fp8 go to scores and weights, of which there are fewer than of K's numbers; V's
    as parts of the tile's largest, since float16 holds no very small weights.
    """
    if SCALED:
        k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SCALED:
        scores *= k_scale[None, :]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new_top
    if MASKED:  # a row that has seen nothing yet has no top: -inf less -inf would be NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    acc *= fade[:, None]
    if SCALED:
        largest = tl.max(v_scale, 0)
        weights *= (v_scale / tl.where(largest > 0.0, largest, 1.0))[None, :]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee") * largest
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc
