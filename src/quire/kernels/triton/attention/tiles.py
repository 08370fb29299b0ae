"""What the attention kernels load: tiles of paged KV, and of the queries that attend to them.

KV in fp8 is loaded as pairs of two dimensions (`fp8_pairs.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import is_fp8
from quire.kernels.pages import LayerPages
from quire.kernels.triton.attention.fp8_pairs import as_pairs
from quire.kernels.triton.sizes import next_power_of_2

GATHERED_KEYS = 128  # of K and V in a tile of `hopper.py`, and in a piece that `dense.py` gathers

_LINE: tl.constexpr = tl.constexpr(128)  # bytes that come from memory together
_FETCH: tl.constexpr = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.b32 wanted, $2, 0;
    @wanted prefetch.global.L2 [$1];
    mov.b32 $0, 0;
}""")


def tile_tokens(pages: LayerPages, most: int) -> int:
    """Tokens per tile, so that a tile of K takes at most 32 KiB."""
    row_bytes = head_width(pages.k) * pages.k.element_size()
    return max(16, min(most, 32768 // row_bytes))


def head_width(pages: Tensor) -> int:
    """The size of a head of K, or V, as tensor cores take it: a power of two, 16 at least, also of
    pairs."""
    return max(32 if is_fp8(pages) else 16, next_power_of_2(pages.shape[-1]))


def page_arguments(pages: LayerPages) -> tuple[Tensor | int, ...]:
    """What an attention kernel takes for the pages, and for the scales of fp8.

    Of the pages: pointer to K, and strides of blocks, from K to V, of heads and slots, those of
    fp8 in pairs. V has the same strides if it is as wide; if not, its own follow from its width.
    """
    loaded = as_pairs(pages.k)
    block_stride, head_stride, slot_stride, _ = loaded.stride()
    k_to_v = pages.k_to_v * pages.k.element_size() // loaded.element_size()
    return (loaded, block_stride, k_to_v, head_stride, slot_stride, *scale_arguments(pages))


@triton.jit
def find_blocks(table, positions, end, BLOCK_SIZE: tl.constexpr):
    """The block of each position. Loops ask for the next tile's while they load this one's: the
    compiler then sees no load that waits for another, and keeps more of them under way. It keeps
    none under way in a loop that holds on to something for longer than until its next turn."""
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


def scale_arguments(pages: LayerPages) -> tuple[Tensor | int, ...]:
    """What a kernel takes for the scales of fp8: pointer to those of K, and strides of blocks, from
    K to V, of heads.

    Other pages have none; a kernel that is told so does not look.
    """
    scales = pages.k_scales
    if scales is None:
        return pages.k, 0, 0, 0
    return scales, scales.stride(0), pages.k_to_v_scales, scales.stride(1)


@triton.jit
def load_tile(
    head_pages,
    head_values,
    blocks,
    positions,
    live,
    block_stride,
    kv_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
):
    """K and V of these positions, `[tokens, width]`; what is not live is 0, never read."""
    starts = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride
    dims = tl.arange(0, HEAD_WIDTH)
    pointers = head_pages + starts[:, None] + dims[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(pointers, mask=mask, other=0.0)
    if V_DIM == HEAD_DIM:
        v = tl.load(pointers + kv_stride, mask=mask, other=0.0)
    else:
        v_starts = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * V_DIM
        v_dims = tl.arange(0, V_WIDTH)
        v_mask = live[:, None] & (v_dims < V_DIM)[None, :]
        v = tl.load(head_values + v_starts[:, None] + v_dims[None, :], mask=v_mask, other=0.0)
    return k, v


@triton.jit
def values_of(pages, kv_stride, kv_head, BLOCK_SIZE: tl.constexpr, V_DIM: tl.constexpr):
    """Where a head's V begins, in the first block."""
    return pages + kv_stride + kv_head * (BLOCK_SIZE * V_DIM)


@triton.jit
def fetch_tile(
    head_pages,
    head_values,
    blocks,
    positions,
    live,
    block_stride,
    kv_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
):
    """Have K and V of these positions brought into the cache that all processors share. Writers
    write into that one too, so it does not matter if some of them are not done."""
    PER_LINE: tl.constexpr = _LINE // (head_pages.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (HEAD_WIDTH + PER_LINE - 1) // PER_LINE
    starts = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride
    dims = tl.arange(0, LINES) * PER_LINE
    pointers = head_pages + starts[:, None] + dims[None, :]
    wanted = (live[:, None] & (dims < HEAD_DIM)[None, :]).to(tl.int32)
    fetch(pointers, wanted)
    if V_DIM == HEAD_DIM:
        fetch(pointers + kv_stride, wanted)
    else:
        V_LINES: tl.constexpr = (V_WIDTH + PER_LINE - 1) // PER_LINE
        v_starts = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * V_DIM
        v_dims = tl.arange(0, V_LINES) * PER_LINE
        wanted = (live[:, None] & (v_dims < V_DIM)[None, :]).to(tl.int32)
        fetch(head_values + v_starts[:, None] + v_dims[None, :], wanted)


@triton.jit
def fetch(pointers, wanted):
    addresses = pointers.to(tl.int64)
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [addresses, wanted], dtype=tl.int32, is_pure=False, pack=1
    )


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
    else:  # they are not used
        k_scale = live.to(tl.float32)
        v_scale = k_scale
    return k_scale, v_scale


@triton.jit
def load_kv(
    head_pages,
    head_values,
    head_scales,
    blocks,
    positions,
    live,
    block_stride,
    kv_stride,
    slot_stride,
    scale_block_stride,
    scale_kv_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
):
    """K and V of these positions as `absorb` takes them, and their scales."""
    NUMBERS: tl.constexpr = 2 if SCALED else 1  # in what is loaded as one
    k, v = load_tile(
        head_pages,
        head_values,
        blocks,
        positions,
        live,
        block_stride,
        kv_stride,
        slot_stride,
        BLOCK_SIZE,
        HEAD_DIM // NUMBERS,
        HEAD_WIDTH // NUMBERS,
        V_DIM // NUMBERS,
        V_WIDTH // NUMBERS,
    )
    k_scale, v_scale = load_scales(
        head_scales,
        blocks,
        positions,
        live,
        scale_block_stride,
        scale_kv_stride,
        BLOCK_SIZE,
        SCALED,
    )
    return k, v, k_scale, v_scale


@triton.jit
def load_query(
    rows,
    row_live,
    dim_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The rows that these pointers begin, as `absorb` takes them: one tile, or one of the even
    dimensions and one of the odd. What fp8 is turned into is float16, so bfloat16 is too."""
    if SCALED:
        even = 2 * tl.arange(0, HEAD_WIDTH // 2)
        pointers = rows[:, None] + even[None, :] * dim_stride
        mask = row_live[:, None] & (even < HEAD_DIM)[None, :]
        first = tl.load(pointers, mask=mask, other=0.0)
        second = tl.load(pointers + dim_stride, mask=mask, other=0.0)
        if first.dtype == tl.bfloat16:
            first, second = first.to(tl.float16), second.to(tl.float16)
        return first, second
    else:
        dims = tl.arange(0, HEAD_WIDTH)
        mask = row_live[:, None] & (dims < HEAD_DIM)[None, :]
        return (tl.load(rows[:, None] + dims[None, :] * dim_stride, mask=mask, other=0.0),)
