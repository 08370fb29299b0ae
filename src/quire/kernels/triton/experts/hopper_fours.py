"""`grouped_fours.py` for MXFP4 on Hopper GPUs: at the rate of tensor cores, or of reading codes.

As many programs as there are multiprocessors share all tiles of a product. Of a program's warps one
fetches codes, exponents and tokens, a tile ahead where it can, and two warpgroups compute. Each has
128 rows of weights: 64 of the gate and 64 of up, or twice 64. While tensor cores multiply one half
of them, the other is unpacked in registers.

    tensor cores   | first half 0  | second half 0 | first half 1  | …
    the rest       | unpack second | unpack first  | unpack second | …
    copies         | ahead of both

In Gluon, a language in Triton that says which warps do what and when. It cannot be interpreted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.activation import Gating
from quire.kernels.four_bits import GROUP, FourBitExperts
from quire.kernels.triton.experts.gating import gating_of
from quire.kernels.triton.experts.hopper_copies import load, passed_on
from quire.kernels.triton.experts.hopper_results import finish
from quire.kernels.triton.experts.hopper_unpack import numbers, packed_rows
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

_HALF = 64  # rows of weights that are unpacked together
_MOST_STAGES = 6
_SHARED_MEMORY = 227 << 10
_REGISTERS = 240  # of a thread that computes; one that fetches needs few


def product(
    x: Tensor,
    weights: FourBitExperts,
    blocks: Blocks,
    activation: Gating | None,
    bias: Tensor | None,
) -> Tensor:
    """Of tokens block by block (`by_block` in `gather.py`), at most 128 pairs in a block, and E2M1
    codes. With an activation the results are block by block too, for the next product. Otherwise
    they are token by token: what goes nowhere is left as it was."""
    codes, words = weights[:2]
    gated = activation is not None
    features = codes.shape[1] // (2 if gated else 1)
    rows = blocks.rows if gated else len(blocks.order)
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    across = cdiv(features, 2 * _HALF if gated else 4 * _HALF)
    _multiply[(min(processors(x.device), blocks.number * across),)](
        _tiles(x, blocks.size, gl.bfloat16),
        _tiles(codes.flatten(0, 1), _HALF, gl.int16),
        words,
        out if bias is None else bias,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        across,
        features,
        codes.shape[2],
        GATED=gated,
        BIASED=bias is not None,
        **gating_of(activation),
        BLOCK=blocks.size,
        STAGES=_stages(blocks.size),
        REGISTERS=_REGISTERS,
        num_warps=4,
        **pdl_launch(x.device),
    )
    return out


def _tiles(rows: Tensor, height: int, dtype: gl.dtype) -> TensorDescriptor:
    shape = [height, GROUP]
    return TensorDescriptor.from_tensor(
        rows, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype)
    )


def _stages(block: int) -> int:
    """As many as there is memory for, beside that in which results change their order."""
    stage = 4 * (_HALF * 2 * GROUP + 4 * _HALF + block * 2 * GROUP)
    results = 2 * _HALF * block * 2
    return min(_MOST_STAGES, (_SHARED_MEMORY - results - 1024) // stage)


@gluon.jit(do_not_specialize=["most", "across"])
def _multiply(
    inputs,
    codes,
    words,
    bias,
    out,
    order,
    table,
    most,
    across,
    features,
    quarter,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    xs = gl.allocate_shared_memory(gl.bfloat16, [4 * STAGES, BLOCK, 32], inputs.layout)
    cs = gl.allocate_shared_memory(gl.int16, [4 * STAGES, 64, 32], codes.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ws = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 64], plain)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=33)  # the tiles, and what each thread copies of words
        mbarrier.init(free.index(i), count=2)  # when both warpgroups are done with it
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_compute, (
                bias, out, order, table, xs, cs, ws, has, free, most, across, features, quarter,
                0, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES,
            )),
            (_compute, (
                bias, out, order, table, xs, cs, ws, has, free, most, across, features, quarter,
                1, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES,
            )),
            (load, (
                inputs, codes, words, table, xs, cs, ws, has, free, most, across, features, quarter,
                GATED, BLOCK, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 40],
    )  # fmt: skip


@gluon.jit
def _compute(
    bias, out, order, table, xs, cs, ws, has, free, most, across, features, quarter,
    WARPGROUP: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_group: gl.constexpr = 64 if GATED else 128
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    steps = quarter // 32
    programs = gl.num_programs(0)
    mine = gl.program_id(0)
    step = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            begin = gl.load(table + most + block)
            end = gl.load(table + 2 * most + block)
            for tile in range(mine, across, programs):
                one = gl.zeros([64, BLOCK], gl.float32, sums)
                other = gl.zeros([64, BLOCK], gl.float32, sums)
                for _ in range(steps):
                    at = step % STAGES
                    x = xs.index(4 * at).permute((1, 0))
                    y = xs.index(4 * at + 1).permute((1, 0))
                    z = xs.index(4 * at + 2).permute((1, 0))
                    w = xs.index(4 * at + 3).permute((1, 0))
                    piece = 4 * at + 2 * WARPGROUP
                    mbarrier.wait(has.index(at), (step // STAGES) & 1)
                    rows = packed_rows(cs.index(piece), ws.index(piece), left)
                    a, b = numbers(rows, 0)
                    one = warpgroup_mma(a, x, one, is_async=True)
                    one = warpgroup_mma(b, y, one, is_async=True)
                    c, d = numbers(rows, 1)
                    one = warpgroup_mma(c, z, one, is_async=True)
                    one = warpgroup_mma(d, w, one, is_async=True)
                    rows = packed_rows(cs.index(piece + 1), ws.index(piece + 1), left)
                    a, b = warpgroup_mma_wait(2, deps=[a, b])
                    a, b = numbers(rows, 0)
                    other = warpgroup_mma(a, x, other, is_async=True)
                    other = warpgroup_mma(b, y, other, is_async=True)
                    one, c, d = warpgroup_mma_wait(2, deps=[one, c, d])
                    c, d = numbers(rows, 1)
                    other = warpgroup_mma(c, z, other, is_async=True)
                    other = warpgroup_mma(d, w, other, is_async=True)
                    other, a, b, c, d = warpgroup_mma_wait(0, deps=[other, a, b, c, d])
                    mbarrier.arrive(free.index(at), count=1)
                    step += 1
                first = tile * (2 * of_group) + WARPGROUP * of_group
                finish(
                    one, other, bias, out, order, block * BLOCK, begin, end, expert, first,
                    features, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, 4,
                )  # fmt: skip
            mine = passed_on((mine + programs - across % programs) % programs)
