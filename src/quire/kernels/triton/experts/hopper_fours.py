"""`grouped_fours.py` for MXFP4 on Hopper GPUs: at the rate of tensor cores, or of reading codes.

As many programs as there are multiprocessors share all tiles of a product. Of a program's warps one
fetches codes and exponents and one fetches tokens, a tile ahead where they can, and two warpgroups
compute. Each has 128 rows of weights: 64 of the gate and 64 of up, or twice 64. While tensor cores
multiply one half of them, the other is unpacked in registers.

    tensor cores   | first half 0  | second half 0 | first half 1  | …
    the rest       | unpack second | unpack first  | unpack second | …
    copies         | ahead of both

Rows are copied 128 bytes at a time, which is what copies are fast with. For codes those are two
steps of 4 x 32 columns. A token's columns lie in the order of steps (`gather.py`), of which one is
256 bytes; the first product leaves its results in that order for the second.

In Gluon, a language in Triton that says which warps do what and when. It cannot be interpreted.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
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
from quire.kernels.four_bits import FourBitExperts, quarter_of
from quire.kernels.triton.experts.gating import gating_of
from quire.kernels.triton.experts.hopper_copies import load_codes, load_tokens, passed_on
from quire.kernels.triton.experts.hopper_results import finish
from quire.kernels.triton.experts.hopper_unpack import quarters
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.pdl import pdl_launch

_HALF = 64  # rows of weights that a warpgroup unpacks together
_TILE = 2 * _HALF  # of both warpgroups
_WIDE = 64  # elements that are copied of a row: 128 bytes
_MOST_STAGES = 5
_SHARED_MEMORY, _SPARE = 227 << 10, 8 << 10  # bytes: barriers, and results that change order
_REGISTERS = 240  # of a thread that computes; one that fetches needs few


def product(
    x: Tensor,
    weights: FourBitExperts,
    blocks: Blocks,
    activation: Gating | None,
    bias: Tensor | None,
) -> Tensor:
    """Of pairs in the order of experts, with columns in that of steps, at most 128 in a block, and
    E2M1 codes. With an activation the results are in such orders too; else they are token by token:
    what goes nowhere is left as it was."""
    codes, words = weights[:2]
    gated = activation is not None
    features = codes.shape[1] // (2 if gated else 1)
    out_quarter = quarter_of(features)
    columns = 4 * out_quarter if gated else features
    out = torch.empty((len(blocks.order), columns), dtype=x.dtype, device=x.device)
    across = triton.cdiv(features, _TILE if gated else 2 * _TILE)
    _multiply[(min(_processors(x.device), blocks.number * across),)](
        _tiles(x, blocks.size, gl.bfloat16),
        _tiles(codes.flatten(0, 1), _TILE, gl.int16),
        words,
        out if bias is None else bias,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        across,
        features,
        codes.shape[2],
        out_quarter,
        GATED=gated,
        BIASED=bias is not None,
        **gating_of(activation),
        BLOCK=blocks.size,
        STAGES=_stages(blocks.size),
        X_STAGES=_x_stages(blocks.size),
        REGISTERS=_REGISTERS,
        num_warps=4,
        **pdl_launch(x.device),
    )
    return out


def _tiles(rows: Tensor, height: int, dtype: gl.dtype) -> TensorDescriptor:
    shape = [height, _WIDE]
    layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return TensorDescriptor.from_tensor(rows, shape, layout)


def _stages(block: int) -> int:
    """Of codes, as many as there is memory for beside tokens."""
    stage = 2 * _TILE * (2 * _WIDE + 2 * 4)
    tokens = _x_stages(block) * block * 4 * _WIDE
    return min(_MOST_STAGES, (_SHARED_MEMORY - _SPARE - tokens) // stage)


def _x_stages(block: int) -> int:
    return 3 if block > 64 else 4


@memoise
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    out_quarter,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    xs = gl.allocate_shared_memory(gl.bfloat16, [2 * X_STAGES, BLOCK, 64], inputs.layout)
    cs = gl.allocate_shared_memory(gl.int16, [2 * STAGES, 128, 64], codes.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ws = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 128], plain)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    has_x = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], flag)
    free_x = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=33)  # the codes, and what each thread copies of words
        mbarrier.init(free.index(i), count=2)  # when both warpgroups are done with it
    for i in gl.static_range(X_STAGES):
        mbarrier.init(has_x.index(i), count=1)
        mbarrier.init(free_x.index(i), count=2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    turns = gl.cdiv(quarter, 64)
    gl.warp_specialize(
        [
            (_compute, (
                bias, out, order, table, xs, cs, ws, has, free, has_x, free_x,
                most, across, features, turns, out_quarter, 0,
                GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES, X_STAGES,
            )),
            (_compute, (
                bias, out, order, table, xs, cs, ws, has, free, has_x, free_x,
                most, across, features, turns, out_quarter, 64,
                GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES, X_STAGES,
            )),
            (load_codes, (
                codes, words, table, cs, ws, has, free, most, across, features, quarter, turns,
                GATED, STAGES,
            )),
            (load_tokens, (inputs, table, xs, has_x, free_x, most, across, turns, X_STAGES)),
        ],
        [4, 1, 1],
        [REGISTERS, 40, 24],
    )  # fmt: skip


@gluon.jit
def _compute(
    bias, out, order, table, xs, cs, ws, has, free, has_x, free_x,
    most, across, features, turns, out_quarter,
    ROW: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):  # fmt: skip
    """`ROW`: this warpgroup's first of a tile's."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    programs = gl.num_programs(0)
    mine = gl.program_id(0)
    turn = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            begin = gl.load(table + most + block)
            end = gl.load(table + 2 * most + block)
            for tile in range(mine, across, programs):
                one = gl.zeros([64, BLOCK], gl.float32, sums)
                other = gl.zeros([64, BLOCK], gl.float32, sums)
                mbarrier.wait(has.index(turn % STAGES), (turn // STAGES) & 1)
                a, b, c, d = quarters(cs, ws, turn % STAGES, 0, 0, ROW, sums)
                for i in range(turns):
                    stage = turn % STAGES
                    following = (turn + 1) % STAGES
                    for step in gl.static_range(2):
                        at = (2 * turn + step) % X_STAGES
                        mbarrier.wait(has_x.index(at), ((2 * turn + step) // X_STAGES) & 1)
                        x, y = xs.index(2 * at), xs.index(2 * at + 1)
                        first = x.slice(0, 32, 1).permute((1, 0))
                        second = x.slice(32, 32, 1).permute((1, 0))
                        third = y.slice(0, 32, 1).permute((1, 0))
                        fourth = y.slice(32, 32, 1).permute((1, 0))
                        one = warpgroup_mma(a, first, one, is_async=True)
                        one = warpgroup_mma(b, second, one, is_async=True)
                        one = warpgroup_mma(c, third, one, is_async=True)
                        one = warpgroup_mma(d, fourth, one, is_async=True)
                        e, f, g, h = quarters(cs, ws, stage, step, 1, ROW, sums)
                        other = warpgroup_mma(e, first, other, is_async=True)
                        other = warpgroup_mma(f, second, other, is_async=True)
                        other = warpgroup_mma(g, third, other, is_async=True)
                        other = warpgroup_mma(h, fourth, other, is_async=True)
                        one, a, b, c, d = warpgroup_mma_wait(4, deps=[one, a, b, c, d])
                        if step == 0:
                            a, b, c, d = quarters(cs, ws, stage, 1, 0, ROW, sums)
                        else:  # behind the last there is nothing to wait for, and nobody needs it
                            its_phase = ((turn + 1) // STAGES) & 1
                            mbarrier.wait(has.index(following), its_phase, pred=i + 1 < turns)
                            a, b, c, d = quarters(cs, ws, following, 0, 0, ROW, sums)
                        other, e, f, g, h = warpgroup_mma_wait(0, deps=[other, e, f, g, h])
                        mbarrier.arrive(free_x.index(at), count=1)
                    mbarrier.arrive(free.index(stage), count=1)
                    turn += 1
                finish(
                    one, other, bias, out, order, begin, end, expert,
                    tile * (128 if GATED else 256) + ROW, features, out_quarter,
                    GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, sums,
                )  # fmt: skip
            mine = passed_on((mine + programs - across % programs) % programs)
