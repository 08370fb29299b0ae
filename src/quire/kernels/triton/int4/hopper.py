"""Many rows times a four-bit matrix on Hopper GPUs, at the rate of tensor cores.

A program has three warpgroups: one loads tiles of x ahead of the two that compute, and both sides
tell each other by barriers what is there and what is free. The weights are the left factor, which
tensor cores take from registers: while they multiply one chunk, the next is unpacked.

This is written in Gluon, as is `attention/hopper.py`. Gluon cannot be interpreted.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.int4_tiles import Int4Tiles

_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def many_rows(
    x: Tensor,
    matrix: Int4Tiles,
    bias: Tensor | None,
    blocks: int = 4,
    height: int = 256,
    stages: int = 3,
    splits: int = 1,
) -> Tensor:
    words, scale, zero, group = matrix
    rows, columns = x.shape
    features = words.shape[0]
    kind = x.dtype if splits == 1 else torch.float32
    out = torch.empty((splits, rows, features), dtype=kind, device=x.device)
    half = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([height, 64], half)
    inputs = TensorDescriptor.from_tensor(x, [height, 64], layout)
    grid = (triton.cdiv(rows, height), triton.cdiv(features, 32 * blocks), splits)
    _many_rows[grid](
        inputs,
        words,
        scale,
        scale if zero is None else zero,
        scale if bias is None else bias,
        out,
        rows,
        features,
        columns,
        GROUP=group,
        BLOCKS=blocks,
        HEIGHT=height,
        STAGES=stages,
        SPLITS=splits,
        ZEROS=zero is not None,
        BIASED=bias is not None,
        REGISTERS=240,
        num_warps=4,
    )
    return out[0] if splits == 1 else out.sum(0).to(x.dtype)


@gluon.jit(do_not_specialize=["rows"])
def _many_rows(
    inputs,
    words,
    scale,
    zero,
    bias,
    out,
    rows,
    features,
    columns,
    GROUP: gl.constexpr,
    BLOCKS: gl.constexpr,
    HEIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    ZEROS: gl.constexpr,
    BIASED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    row = gl.program_id(0) * HEIGHT
    block = gl.program_id(1) * (2 * BLOCKS)
    tiles = columns // 128
    first = gl.program_id(2) * tiles // SPLITS
    last = (gl.program_id(2) + 1) * tiles // SPLITS
    out += gl.program_id(2).to(gl.int64) * rows * features
    dtype: gl.constexpr = inputs.dtype
    xs = gl.allocate_shared_memory(dtype, [2 * STAGES, HEIGHT, 64], inputs.layout)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (_compute, (
                words, scale, zero, bias, out, xs, has, free, block, row, rows, features, tiles,
                first, last, GROUP, BLOCKS, HEIGHT, STAGES, ZEROS, BIASED,
            )),
            (_compute, (
                words, scale, zero, bias, out, xs, has, free, block + BLOCKS, row, rows, features,
                tiles, first, last, GROUP, BLOCKS, HEIGHT, STAGES, ZEROS, BIASED,
            )),
            (_load, (inputs, xs, has, free, row, first, last, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _load(inputs, xs, has, free, row, first, last, STAGES: gl.constexpr):
    for i in range(last - first):
        at = i % STAGES
        column = (first + i) * 128
        mbarrier.wait(free.index(at), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(has.index(at), 2 * inputs.block_type.nbytes)
        _fetch(inputs, [row, column], has.index(at), xs.index(2 * at))
        _fetch(inputs, [row, column + 64], has.index(at), xs.index(2 * at + 1))


@gluon.jit
def _compute(
    words,
    scale,
    zero,
    bias,
    out,
    xs,
    has,
    free,
    first_block,
    first_row,
    rows,
    features,
    tiles,
    first,
    last,
    GROUP: gl.constexpr,
    BLOCKS: gl.constexpr,
    HEIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    ZEROS: gl.constexpr,
    BIASED: gl.constexpr,
):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [4, 1, 1], [2, 0, 1])
    block = first_block + gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, flat)))
    fragment = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, flat)))
    word = gl.arange(0, 256, layout=gl.SliceLayout(0, gl.SliceLayout(1, flat)))
    live = (block * 16 < features)[:, None, None]
    codes_at = (
        words
        + (block.to(gl.int64) * (tiles * 512))[:, None, None]
        + (fragment[None, :, None] * 256 + word[None, None, :])
    )
    of_group: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    its_block = first_block + gl.arange(
        0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_group))
    )
    thread = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_group)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_group)))
    its_live = (its_block * 16 < features)[:, None, None]
    group_at = (its_block * (tiles * 128 // GROUP * 16))[:, None, None] + (
        thread[None, :, None] // 4 * 2 + half[None, None, :]
    )
    acc = gl.zeros([16 * BLOCKS, HEIGHT], gl.float32, sums)
    codes_at += first * 512
    group_at += first * 128 // GROUP * 16
    codes = gl.load(codes_at, mask=live, other=0)
    scales = gl.load(scale + group_at, mask=its_live, other=0)
    zeros = scales
    if ZEROS:
        zeros = gl.load(zero + group_at, mask=its_live, other=0)
    dtype: gl.constexpr = xs.dtype
    a = _chunk(codes, scales, zeros, 0, ZEROS, BLOCKS, dtype, sums)
    for i in range(last - first):
        at = i % STAGES
        more = first + i + 1 < last
        next_codes = gl.load(codes_at + (i + 1) * 512, mask=live & more, other=0)
        next_group = ((first + i + 1) * 128 // GROUP - first * 128 // GROUP) * 16
        next_scales = gl.load(scale + group_at + next_group, mask=its_live & more, other=0)
        next_zeros = next_scales
        if ZEROS:
            next_zeros = gl.load(zero + group_at + next_group, mask=its_live & more, other=0)
        mbarrier.wait(has.index(at), (i // STAGES) & 1)
        left = xs.index(2 * at)
        right = xs.index(2 * at + 1)
        acc = warpgroup_mma(a, left.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
        b = _chunk(codes, scales, zeros, 1, ZEROS, BLOCKS, dtype, sums)
        acc, a = warpgroup_mma_wait(0, deps=[acc, a])
        acc = warpgroup_mma(b, left.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
        a = _chunk(codes, scales, zeros, 2, ZEROS, BLOCKS, dtype, sums)
        acc, b = warpgroup_mma_wait(0, deps=[acc, b])
        acc = warpgroup_mma(a, right.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
        b = _chunk(codes, scales, zeros, 3, ZEROS, BLOCKS, dtype, sums)
        acc, a = warpgroup_mma_wait(0, deps=[acc, a])
        acc = warpgroup_mma(b, right.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
        codes, scales, zeros = next_codes, next_scales, next_zeros
        a = _chunk(codes, scales, zeros, 0, ZEROS, BLOCKS, dtype, sums)
        acc, b = warpgroup_mma_wait(0, deps=[acc, b])
        mbarrier.arrive(free.index(at), count=1)

    if BIASED:
        wide = first_block * 16 + gl.arange(0, 16 * BLOCKS, layout=gl.SliceLayout(1, sums))
        acc += gl.load(bias + wide, mask=wide < features, other=0.0).to(gl.float32)[:, None]
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(acc.to(out.dtype.element_ty), memory)
    feature = first_block * 16 + gl.arange(0, 16 * BLOCKS, layout=gl.SliceLayout(1, memory))
    row = first_row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, memory))
    target = out + row.to(gl.int64)[None, :] * features + feature[:, None]
    gl.store(target, result, mask=(row < rows)[None, :] & (feature < features)[:, None])


@gluon.jit
def _chunk(
    codes,
    scales,
    zeros,
    CHUNK: gl.constexpr,
    ZEROS: gl.constexpr,
    BLOCKS: gl.constexpr,
    dtype: gl.constexpr,
    sums: gl.constexpr,
):
    """32 columns as a left factor."""
    tile: gl.constexpr = gl.BlockedLayout(
        [1, 2, 1, 2, 4], [1, 1, 32, 1, 1], [4, 1, 1, 1, 1], [4, 3, 1, 2, 0]
    )
    words = gl.convert_layout(gl.reshape(codes, [BLOCKS, 2, 32, 2, 4]), tile)
    by = gl.convert_layout(gl.reshape(scales, [BLOCKS, 1, 32, 2, 1]), tile)
    one: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    if ZEROS:
        low = gl.convert_layout(gl.reshape(zeros, [BLOCKS, 1, 32, 2, 1]), tile)
        less = -one - low.to(dtype)
    else:
        less = gl.full([1, 1, 1, 1, 1], -one - 8, dtype, tile)
    asm: gl.constexpr = _asm_of(CHUNK, dtype)
    if dtype == gl.bfloat16:
        numbers = gl.inline_asm_elementwise(
            asm, "=r,r,r,r", [words, by, less], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        numbers = gl.inline_asm_elementwise(
            asm, "=r,r,r,r", [words, by, less], dtype=gl.float16, is_pure=True, pack=2
        )
    numbers = gl.reshape(numbers, [BLOCKS, 2, 8, 4, 2, 2, 2])
    numbers = gl.permute(numbers, [0, 4, 2, 1, 5, 3, 6])
    return gl.convert_layout(
        gl.reshape(numbers, [16 * BLOCKS, 32]), gl.DotOperandLayout(0, sums, 2)
    )


@gluon.constexpr_function
def _asm_of(chunk, dtype):
    kind = "f16" if dtype == gl.float16 else "bf16"
    magic = "0x64006400" if dtype == gl.float16 else "0x43004300"
    return f"""{{
.reg .b32 w;
shr.b32 w, $1, {4 * chunk};
lop3.b32 w, w, 0x000f000f, {magic}, 0xea;
add.rn.{kind}x2 w, w, $3;
mul.rn.{kind}x2 $0, w, $2;
}}"""
