"""Codes in blocks by codes in groups for many rows, on Hopper GPUs: at the rate of tensor cores.

The sums of 128 columns have to be scaled before they are added to those of others, which tensor
cores cannot do. So of a program's four warpgroups three compute, 64 tokens by 128 features each,
and each for itself: while some scale, the tensor cores work for another. The fourth loads tiles
ahead of them, and both sides tell each other by barriers what is there and what is free. Programs
stay for many tiles, so that the next one's codes are on their way while results are written.

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

from quire.kernels.codes import BlockScales, Codes
from quire.kernels.triton.codes.tiles_product import processors

_PARTS, _PART = 3, 64  # tokens of a tile: those of each warpgroup
_BLOCK = 128  # its features and columns: those of a block
_STAGES = 5
_BAND = 8  # tiles of tokens that run together, for all features
# By its name in later versions of Triton, or in the first.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def multiply_blocks(x: Codes, weight: Tensor, scales: BlockScales, bias: Tensor | None) -> Tensor:
    """`[tokens, columns]` in groups of 128 by `[features, columns]` in blocks of 128 × 128."""
    (rows, columns), features = x.values.shape, len(weight)
    out = torch.empty((rows, features), dtype=x.dtype, device=weight.device)
    tiles = triton.cdiv(rows, _PARTS * _PART) * triton.cdiv(features, _BLOCK)
    layout = gl.NVMMASharedLayout.get_default_for([_PART, _BLOCK], gl.float8e4nv)
    _multiply_blocks[(min(tiles, processors(weight.device)),)](
        TensorDescriptor.from_tensor(x.values, [_PART, _BLOCK], layout),
        TensorDescriptor.from_tensor(weight, [_BLOCK, _BLOCK], layout),
        x.scales,
        scales.values,
        out if bias is None else bias,
        out,
        rows,
        features,
        columns,
        scales.values.stride(0),
        x.scales.stride(1),
        tiles,
        STAGES=_STAGES,
        BAND=_BAND,
        BIASED=bias is not None,
        num_warps=4,
    )
    return out


@gluon.jit(do_not_specialize=["rows", "x_scale_stride", "tiles"])
def _multiply_blocks(
    inputs,
    weight,
    x_scales,
    scales,
    bias,
    out,
    rows,
    features,
    columns,
    scale_stride,
    x_scale_stride,
    tiles,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    BIASED: gl.constexpr,
):
    xs = gl.allocate_shared_memory(gl.float8e4nv, [3 * STAGES, 64, 128], inputs.layout)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], weight.layout)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=1)
        mbarrier.init(free.index(i), count=3)
    gl.warp_specialize(
        [
            (_compute, (
                xs, ws, has, free, x_scales, scales, bias, out, rows, features, columns,
                scale_stride, x_scale_stride, tiles, 0, STAGES, BAND, BIASED,
            )),
            (_compute, (
                xs, ws, has, free, x_scales, scales, bias, out, rows, features, columns,
                scale_stride, x_scale_stride, tiles, 1, STAGES, BAND, BIASED,
            )),
            (_compute, (
                xs, ws, has, free, x_scales, scales, bias, out, rows, features, columns,
                scale_stride, x_scale_stride, tiles, 2, STAGES, BAND, BIASED,
            )),
            (_load, (
                inputs, weight, xs, ws, has, free, rows, features, columns, tiles, STAGES, BAND,
            )),
        ],
        [4, 4, 1],
        [152, 152, 24],
    )  # fmt: skip


@gluon.jit
def _place(turn, rows, features, BAND: gl.constexpr):
    """The first token and feature of this program's next tile: a band of tokens after another."""
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    down, across = gl.cdiv(rows, 192), gl.cdiv(features, 128)
    band = tile // (BAND * across) * BAND
    height = gl.minimum(BAND, down - band)
    within = tile % (BAND * across)
    return (band + within % height) * 192, within // height * 128


@gluon.jit
def _turns(tiles):
    """How many tiles this program has."""
    return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _load(
    inputs,
    weight,
    xs,
    ws,
    has,
    free,
    rows,
    features,
    columns,
    tiles,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    groups = columns // 128
    for turn in range(_turns(tiles)):
        first_row, first = _place(turn, rows, features, BAND)
        for group in range(groups):
            step = turn * groups + group
            at = step % STAGES
            mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(has.index(at), 3 * inputs.block_type.nbytes + weight.block_type.nbytes)
            for part in gl.static_range(3):
                place = [first_row + part * 64, group * 128]
                _load_tile(inputs, place, has.index(at), xs.index(3 * at + part))
            _load_tile(weight, [first, group * 128], has.index(at), ws.index(at))


@gluon.jit
def _compute(
    xs,
    ws,
    has,
    free,
    x_scales,
    scales,
    bias,
    out,
    rows,
    features,
    columns,
    scale_stride,
    x_scale_stride,
    tiles,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    BIASED: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    groups = columns // 128
    nothing = gl.zeros([64, 128], gl.float32, layout)
    for turn in range(_turns(tiles)):
        first_row, first = _place(turn, rows, features, BAND)
        row = first_row + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        x_scale_at = x_scales + row
        scale_at = scales + first // 128 * scale_stride
        factor = gl.load(x_scale_at, mask=row < rows, other=0.0) * gl.load(scale_at)
        sums = nothing
        for group in range(groups):
            # Asked for long before they are looked at: this is read from the cache of all.
            following = gl.minimum(group + 1, groups - 1)
            x_scale = gl.load(x_scale_at + following * x_scale_stride, mask=row < rows, other=0.0)
            scale = gl.load(scale_at + following)
            step = turn * groups + group
            at = step % STAGES
            mbarrier.wait(has.index(at), (step // STAGES) & 1)
            x, w = xs.index(3 * at + PART), ws.index(at).permute((1, 0))
            found = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
            found = warpgroup_mma_wait(0, deps=[found])
            mbarrier.arrive(free.index(at), count=1)
            sums += found * factor[:, None]
            factor = x_scale * scale
        feature = first + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
        if BIASED:
            added = gl.load(bias + feature, mask=feature < features, other=0.0)
            sums += added.to(gl.float32)[None, :]
        target = out + row.to(gl.int64)[:, None] * features + feature[None, :]
        live = (row < rows)[:, None] & (feature < features)[None, :]
        gl.store(target, sums.to(out.dtype.element_ty), mask=live)
