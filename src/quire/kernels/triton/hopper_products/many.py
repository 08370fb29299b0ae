"""More than a few rows times a packed matrix, on Hopper GPUs: at the rate of tensor cores.

A program multiplies 128 rows of the matrix by a tile of x's rows. Of its three warpgroups one loads
tiles of x ahead of the two that compute, 64 rows of the matrix each, and both sides tell each other
by barriers what is there and what is free. The weights are the left factor, which tensor cores take
from registers: while they multiply one chunk, the next is unpacked.

Tensors have powers of two as sizes, and a tile of 96, 160 or 192 rows is two of these, above each
other: what is unpacked once is multiplied with both.

A format (`PackedMatrix`) says what is copied of a matrix and how a chunk of it becomes numbers; its
functions are in `int4/ring.py` and `gguf/ring.py`. They are arguments of the kernel one by one:
Triton keeps compiled kernels by their sources, but not by those of functions within a tuple.

Programs come in waves, one for each multiprocessor. Those of the last wave, which would leave some
idle, share their columns with others; `combine.py` adds what these found.

This is written in Gluon, as is `attention/hopper.py`. Gluon cannot be interpreted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from quire.kernels.triton.gluon_names import tma_load
from quire.kernels.triton.hopper_products.combine import combine
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

FEATURES = 128  # of a program
ALIGNED = 16  # bytes: what hardware copies tiles of x from
# Rows of x for a program: the first of its tile, and those of the second.
_HEIGHTS = ((16, 0), (32, 0), (64, 0), (64, 32), (128, 0), (128, 32), (128, 64), (256, 0))
# Of a smaller matrix, programs of so many rows are too few: 192 rows of qkv took 27.5 us instead of
# 25.3 with programs of 128.
_MANY, LARGE = 192, 40 << 20  # weights
_MOST_SPLITS = 8
_LEAST_TILES = 4  # of a split
_SHARED = 222 << 10  # bytes for tiles: 5 KiB of what a program may have are for storing results


class PackedMatrix(NamedTuple):
    """A matrix in tiles of 16 rows by 128 columns, and how the kernel reads it.

    Of four tiles, one of each of so many blocks of 16 rows:
        make_ring   shared memory for some steps
        fetch       begins to copy a step's tiles there
        take        what is there of a step, in registers
        numbers_of  the numbers `[4, 16, 32]` of one of its chunks, as a left factor's fragments
    """

    parts: tuple[Tensor, ...]
    features: int
    columns: int  # those of tiles
    settings: Any  # of which the functions know
    make_ring: Any
    fetch: Any
    take: Any
    numbers_of: Any
    step_bytes: int  # of shared memory for four tiles
    unpacking: int  # rows of x that are multiplied while as many weights are unpacked


def can_read(x: Tensor) -> bool:
    """Whether x lies where hardware copies from."""
    return x.data_ptr() % ALIGNED == 0 and x.stride(0) * x.itemsize % ALIGNED == 0


def many_rows(x: Tensor, matrix: PackedMatrix, bias: Tensor | None, out: Tensor) -> None:
    """`F.linear` into `out`, whose rows may be apart, of x that it `can_read`."""
    rows, features, columns = len(x), matrix.features, matrix.columns
    low, high = heights(rows, features * columns, matrix.unpacking)
    height = low + high
    # Tiles of x and of codes on their way, as many as there is shared memory for.
    stages = 3 if height >= 192 else 4
    left = _SHARED - stages * 128 * height * x.itemsize
    steps = min(3 if height == 256 else 6, left // (2 * matrix.step_bytes))
    across, below = cdiv(rows, height), cdiv(features, FEATURES)
    whole, splits = _waves(across * below, columns // 128, processors(x.device))
    parts = (across * below - whole) * splits
    room = (parts if splits > 1 else 1, FEATURES, height)
    partial = torch.empty(room, dtype=torch.float32, device=x.device)
    half = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    inputs = [
        TensorDescriptor.from_tensor(
            x, [part, 64], gl.NVMMASharedLayout.get_default_for([part, 64], half)
        )
        for part in (low, high or low)
    ]
    _many_rows[(whole + parts,)](
        *inputs,
        matrix.parts,
        out if bias is None else bias,
        out,
        partial,
        rows,
        features,
        columns,
        out.stride(0),
        across,
        whole,
        splits,
        SETTINGS=matrix.settings,
        MAKE_RING=matrix.make_ring,
        FETCH=matrix.fetch,
        TAKE=matrix.take,
        NUMBERS_OF=matrix.numbers_of,
        HEIGHT=low,
        MORE=high,
        STAGES=stages,
        STEPS=steps,
        BIASED=bias is not None,
        REGISTERS=240,
        num_warps=4,
    )
    if splits > 1:
        combine(partial, splits, whole, across, bias, out)


def heights(rows: int, weights: int, unpacking: int) -> tuple[int, int]:
    """Those of a program's tile, and of its second part: all rows, if one may have so many."""
    fitting = next((each for each in _HEIGHTS if rows <= sum(each)), None)
    if fitting is not None:
        return (128, 0) if sum(fitting) >= _MANY and weights < LARGE else fitting
    large = [each for each in _HEIGHTS if sum(each) >= 128]
    return min(large, key=lambda each: cdiv(rows, sum(each)) * (sum(each) + unpacking))


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
    more_inputs,
    matrix,
    bias,
    out,
    partial,
    rows,
    features,
    columns,
    out_stride,
    across,
    whole,
    splits,
    SETTINGS: gl.constexpr,
    MAKE_RING: gl.constexpr,
    FETCH: gl.constexpr,
    TAKE: gl.constexpr,
    NUMBERS_OF: gl.constexpr,
    HEIGHT: gl.constexpr,
    MORE: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
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
    row = tile % across * (HEIGHT + MORE)
    block = tile // across * 8
    dtype: gl.constexpr = out.dtype.element_ty
    xs = gl.allocate_shared_memory(dtype, [2 * STAGES, HEIGHT, 64], inputs.layout)
    more_xs = xs
    if MORE:
        more_xs = gl.allocate_shared_memory(dtype, [2 * STAGES, MORE, 64], more_inputs.layout)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    ring = MAKE_RING(STEPS, matrix, SETTINGS)
    other_ring = MAKE_RING(STEPS, matrix, SETTINGS)
    gl.warp_specialize(
        [
            (_compute, (
                matrix, bias, out, partial, xs, more_xs, has, free, ring, block, row,
                rows, features, columns, out_stride, first, last, part, 0,
                SETTINGS, FETCH, TAKE, NUMBERS_OF, HEIGHT, MORE, STAGES, STEPS, BIASED,
            )),
            (_compute, (
                matrix, bias, out, partial, xs, more_xs, has, free, other_ring, block + 4, row,
                rows, features, columns, out_stride, first, last, part, 64,
                SETTINGS, FETCH, TAKE, NUMBERS_OF, HEIGHT, MORE, STAGES, STEPS, BIASED,
            )),
            (_load, (
                inputs, more_inputs, xs, more_xs, has, free, row, first, last, HEIGHT, MORE, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _load(
    inputs,
    more_inputs,
    xs,
    more_xs,
    has,
    free,
    row,
    first,
    last,
    HEIGHT: gl.constexpr,
    MORE: gl.constexpr,
    STAGES: gl.constexpr,
):
    for i in range(last - first):
        at = i % STAGES
        column = (first + i) * 128
        mbarrier.wait(free.index(at), ((i // STAGES) & 1) ^ 1)
        size: gl.constexpr = 2 * inputs.block_type.nbytes
        more: gl.constexpr = 2 * more_inputs.block_type.nbytes if MORE else 0
        mbarrier.expect(has.index(at), size + more)
        for half in gl.static_range(2):
            place = column + 64 * half
            tma_load(inputs, [row, place], has.index(at), xs.index(2 * at + half))
            if MORE:
                to = more_xs.index(2 * at + half)
                tma_load(more_inputs, [row + HEIGHT, place], has.index(at), to)


@gluon.jit
def _compute(
    matrix,
    bias,
    out,
    partial,
    xs,
    more_xs,
    has,
    free,
    ring,
    block,
    first_row,
    rows,
    features,
    columns,
    out_stride,
    first,
    last,
    part,
    first_feature,
    SETTINGS: gl.constexpr,
    FETCH: gl.constexpr,
    TAKE: gl.constexpr,
    NUMBERS_OF: gl.constexpr,
    HEIGHT: gl.constexpr,
    MORE: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    BIASED: gl.constexpr,
):
    dtype: gl.constexpr = out.dtype.element_ty
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    more_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or HEIGHT, 16])
    chunk: gl.constexpr = 2 if MORE else 1  # products under way behind those of a chunk
    acc = gl.zeros([64, HEIGHT], gl.float32, sums)
    more = acc
    if MORE:
        more = gl.zeros([64, MORE], gl.float32, more_sums)
    blocks = (features + 15) // 16
    for i in gl.static_range(STEPS):
        FETCH(ring, matrix, i, block, first + i, last, blocks, columns, SETTINGS)
    for i in range(last - first):
        async_copy.wait_group(STEPS - 1)
        taken = TAKE(ring, i, SETTINGS)
        FETCH(ring, matrix, i + STEPS, block, first + i + STEPS, last, blocks, columns, SETTINGS)
        a = _left(NUMBERS_OF(taken, 0, dtype, SETTINGS), sums)
        at = i % STAGES
        mbarrier.wait(has.index(at), (i // STAGES) & 1)
        x, more_x = xs.index(2 * at), more_xs.index(2 * at)
        acc, more = _multiply(a, x, more_x, 0, acc, more, MORE)
        b = _left(NUMBERS_OF(taken, 1, dtype, SETTINGS), sums)
        acc, more = _multiply(b, x, more_x, 32, acc, more, MORE)
        # One chunk's products are always under way: what is behind a wait for all of them, the
        # compiler also puts behind it where it could come before.
        a = warpgroup_mma_wait(chunk, deps=[a])
        a = _left(NUMBERS_OF(taken, 2, dtype, SETTINGS), sums)
        x, more_x = xs.index(2 * at + 1), more_xs.index(2 * at + 1)
        acc, more = _multiply(a, x, more_x, 0, acc, more, MORE)
        b = warpgroup_mma_wait(chunk, deps=[b])
        b = _left(NUMBERS_OF(taken, 3, dtype, SETTINGS), sums)
        acc, more = _multiply(b, x, more_x, 32, acc, more, MORE)
        if MORE:
            acc, more, a, b = warpgroup_mma_wait(0, deps=[acc, more, a, b])
        else:
            acc, a, b = warpgroup_mma_wait(0, deps=[acc, a, b])
        mbarrier.arrive(free.index(at), count=1)
    async_copy.wait_group(0)

    height: gl.constexpr = HEIGHT + MORE
    if part < 0:
        _store(acc, bias, out, block, first_row, rows, features, out_stride, HEIGHT, BIASED, sums)
        if MORE:
            below = first_row + HEIGHT
            _store(
                more, bias, out, block, below, rows, features, out_stride, MORE, BIASED, more_sums
            )
    else:
        target = partial + part.to(gl.int64) * (128 * height) + first_feature * height
        _store_part(acc, target, height, HEIGHT, sums)
        if MORE:
            _store_part(more, target + HEIGHT, height, MORE, more_sums)


@gluon.jit
def _multiply(left, x, more_x, FIRST: gl.constexpr, acc, more, MORE: gl.constexpr):
    """A chunk with the columns from FIRST on of both parts of a tile."""
    acc = warpgroup_mma(left, x.slice(FIRST, 32, 1).permute((1, 0)), acc, is_async=True)
    if MORE:
        right = more_x.slice(FIRST, 32, 1).permute((1, 0))
        more = warpgroup_mma(left, right, more, is_async=True)
    return acc, more


@gluon.jit
def _store_part(acc, target, height: gl.constexpr, COLUMNS: gl.constexpr, sums: gl.constexpr):
    feature = gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, sums))
    gl.store(target + feature[:, None] * height + column[None, :], acc)


@gluon.jit
def _store(
    acc,
    bias,
    out,
    block,
    first_row,
    rows,
    features,
    out_stride,
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
    target = out + row.to(gl.int64)[None, :] * out_stride + feature[:, None]
    gl.store(target, result, mask=(row < rows)[None, :] & (feature < features)[:, None])


@gluon.jit
def _left(numbers, sums: gl.constexpr):
    return gl.convert_layout(gl.reshape(numbers, [64, 32]), gl.DotOperandLayout(0, sums, 2))
