"""More than a few rows times a four-bit matrix, on Hopper GPUs: at the rate of tensor cores.

A program multiplies 128 rows of the matrix by a tile of x's rows. Of its three warpgroups one loads
tiles of x ahead of the two that compute, 64 rows of the matrix each, and both sides tell each other
by barriers what is there and what is free. The weights are the left factor, which tensor cores take
from registers: while they multiply one chunk, the next is unpacked.

Programs come in waves, one for each multiprocessor. Those of the last wave, which would leave some
idle, share their columns with others; `combine.py` adds what these found.

This is written in Gluon, as is `attention/hopper.py`. Gluon cannot be interpreted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.gluon_names import tma_load
from quire.kernels.triton.int4.combine import combine
from quire.kernels.triton.int4.ring import fetch, make_ring, numbers_of, take
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

FEATURES = 128  # of a program
_LEAST_HEIGHT, _MOST_HEIGHT = 16, 256  # rows of x for a program
# Programs of half as many rows unpack codes twice, which costs 5 to 17 % (384 to 1,024 rows of
# Qwen3-8B's products on an H200). Up to the most rows, there are too few programs otherwise, unless
# the matrix is large: 160 rows of the gate took 84 us instead of 98, of qkv 33 instead of 28.
_COST_OF_HALF = 1.15
_LARGE = 40 << 20  # weights
_MOST_SPLITS = 8
_LEAST_TILES = 4  # of a split


def many_rows(x: Tensor, matrix: Int4Tiles, bias: Tensor | None) -> Tensor:
    """`F.linear`, where scales are of x's type; rows of x begin where hardware copies from."""
    words, scale, zero, group = matrix
    rows, columns = x.shape
    features = len(words)
    height = _height(rows, features * columns)
    stages, steps = (3, 3) if height == 256 else (4, 6)
    across, below = cdiv(rows, height), cdiv(features, FEATURES)
    whole, splits = _waves(across * below, columns // 128, processors(x.device))
    parts = (across * below - whole) * splits
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    room = (parts if splits > 1 else 1, FEATURES, height)
    partial = torch.empty(room, dtype=torch.float32, device=x.device)
    half = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([height, 64], half)
    _many_rows[(whole + parts,)](
        TensorDescriptor.from_tensor(x, [height, 64], layout),
        words,
        scale,
        words.view(torch.uint8) if zero is None else zero,
        scale if bias is None else bias,
        out,
        partial,
        rows,
        features,
        columns,
        across,
        whole,
        splits,
        GROUP=group,
        HEIGHT=height,
        STAGES=stages,
        STEPS=steps,
        ZEROS=zero is not None,
        BIASED=bias is not None,
        REGISTERS=240,
        num_warps=4,
    )
    if splits > 1:
        combine(partial, splits, whole, across, bias, out)
    return out


def _height(rows: int, weights: int) -> int:
    half = _MOST_HEIGHT // 2
    if half < rows <= _MOST_HEIGHT and weights >= _LARGE:
        return _MOST_HEIGHT
    if rows <= _MOST_HEIGHT:
        return min(half, max(_LEAST_HEIGHT, 1 << (rows - 1).bit_length()))
    whole_rows, half_rows = (cdiv(rows, h) * h for h in (_MOST_HEIGHT, half))
    return _MOST_HEIGHT if whole_rows < _COST_OF_HALF * half_rows else half


def _waves(programs: int, tiles: int, processors: int) -> tuple[int, int]:
    """How many programs have all columns, and how many share those of each other one."""
    whole = programs // processors * processors
    if whole == programs:
        return whole, 1
    splits = min(processors // (programs - whole), _MOST_SPLITS, tiles // _LEAST_TILES)
    return (programs, 1) if splits < 2 else (whole, splits)


@gluon.jit(do_not_specialize=["rows", "across", "whole", "splits"])
def _many_rows(
    inputs,
    words,
    scale,
    zero,
    bias,
    out,
    partial,
    rows,
    features,
    columns,
    across,
    whole,
    splits,
    GROUP: gl.constexpr,
    HEIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    ZEROS: gl.constexpr,
    BIASED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    program = gl.program_id(0)
    tiles = columns // 128
    # Negative, if this program has all columns of its tile.
    part = program - whole
    is_part = part >= 0
    tile = gl.where(is_part, whole + part // splits, program)
    first = gl.where(is_part, part % splits * tiles // splits, 0)
    last = gl.where(is_part, (part % splits + 1) * tiles // splits, tiles)
    row = tile % across * HEIGHT
    block = tile // across * 8
    dtype: gl.constexpr = out.dtype.element_ty
    xs = gl.allocate_shared_memory(dtype, [2 * STAGES, HEIGHT, 64], inputs.layout)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    ring = make_ring(STEPS, 4, GROUP, dtype, zero.dtype.element_ty)
    other_ring = make_ring(STEPS, 4, GROUP, dtype, zero.dtype.element_ty)
    gl.warp_specialize(
        [
            (_compute, (
                words, scale, zero, bias, out, partial, xs, has, free, ring, block, row, rows,
                features, columns, first, last, part, 0,
                GROUP, HEIGHT, STAGES, STEPS, ZEROS, BIASED,
            )),
            (_compute, (
                words, scale, zero, bias, out, partial, xs, has, free, other_ring, block + 4, row,
                rows, features, columns, first, last, part, 64,
                GROUP, HEIGHT, STAGES, STEPS, ZEROS, BIASED,
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
        tma_load(inputs, [row, column], has.index(at), xs.index(2 * at))
        tma_load(inputs, [row, column + 64], has.index(at), xs.index(2 * at + 1))


@gluon.jit
def _compute(
    words,
    scale,
    zero,
    bias,
    out,
    partial,
    xs,
    has,
    free,
    ring,
    block,
    first_row,
    rows,
    features,
    columns,
    first,
    last,
    part,
    first_feature,
    GROUP: gl.constexpr,
    HEIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    ZEROS: gl.constexpr,
    BIASED: gl.constexpr,
):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    acc = gl.zeros([64, HEIGHT], gl.float32, sums)
    blocks = features // 16
    for i in gl.static_range(STEPS):
        fetch(
            ring, words, scale, zero, i, block, first + i, last, blocks, columns,
            GROUP, True, ZEROS,
        )  # fmt: skip
    for i in range(last - first):
        async_copy.wait_group(STEPS - 1)
        codes, scales, lows = take(ring, i, GROUP, ZEROS)
        fetch(
            ring, words, scale, zero, i + STEPS, block, first + i + STEPS, last, blocks, columns,
            GROUP, True, ZEROS,
        )  # fmt: skip
        a = _left(codes, scales, lows, 0, sums)
        at = i % STAGES
        mbarrier.wait(has.index(at), (i // STAGES) & 1)
        x = xs.index(2 * at)
        acc = warpgroup_mma(a, x.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
        b = _left(codes, scales, lows, 1, sums)
        acc = warpgroup_mma(b, x.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
        # One chunk's products are always under way: what is behind a wait for all of them, the
        # compiler also puts behind it where it could come before.
        a = warpgroup_mma_wait(1, deps=[a])
        a = _left(codes, scales, lows, 2, sums)
        x = xs.index(2 * at + 1)
        acc = warpgroup_mma(a, x.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
        b = warpgroup_mma_wait(1, deps=[b])
        b = _left(codes, scales, lows, 3, sums)
        acc = warpgroup_mma(b, x.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
        acc, a, b = warpgroup_mma_wait(0, deps=[acc, a, b])
        mbarrier.arrive(free.index(at), count=1)
    async_copy.wait_group(0)

    if part < 0:
        _store(acc, bias, out, block, first_row, rows, features, HEIGHT, BIASED, sums)
    else:
        feature = first_feature + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
        column = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, sums))
        target = partial + part.to(gl.int64) * (128 * HEIGHT)
        gl.store(target + feature[:, None] * HEIGHT + column[None, :], acc)


@gluon.jit
def _store(
    acc,
    bias,
    out,
    block,
    first_row,
    rows,
    features,
    HEIGHT: gl.constexpr,
    BIASED: gl.constexpr,
    sums: gl.constexpr,
):
    if BIASED:
        wide = block * 16 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
        added = gl.load(bias + wide, mask=wide < features, other=0.0)
        acc += added.to(gl.float32)[:, None]
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(acc.to(out.dtype.element_ty), memory)
    feature = block * 16 + gl.arange(0, 64, layout=gl.SliceLayout(1, memory))
    row = first_row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, memory))
    target = out + row.to(gl.int64)[None, :] * features + feature[:, None]
    gl.store(target, result, mask=(row < rows)[None, :] & (feature < features)[:, None])


@gluon.jit
def _left(codes, scales, lows, CHUNK: gl.constexpr, sums: gl.constexpr):
    numbers = gl.reshape(numbers_of(codes, scales, lows, CHUNK), [64, 32])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, sums, 2))
