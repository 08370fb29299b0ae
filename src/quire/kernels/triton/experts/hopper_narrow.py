"""`hopper_fours.py` for few tokens an expert: at the rate of reading codes.

As many programs as there are multiprocessors share all rows of a product, in units of 128: 64 of
the gate and the same 64 of up, or twice 64. Shares take the same time. Of a program's warps one
fetches codes and exponents and another one tokens, as many steps ahead as there is memory for
(`hopper_narrow_copies.py`), and two partitions of two warpgroups compute, each a unit, where that
many of a block are left. A step has 64 elements of each quarter, so that rows of codes are read 128
bytes at a time.

A partition unpacks two quarters of 32 elements of its rows, has tensor cores multiply them, and
unpacks the next two meanwhile. It waits for all its products once a step; the other partition uses
the processor then.

    rows of 16 that tensor cores have of one warp | 8 of the first half | 8 of the second half |

So a thread has the sums of a gate and of its up, and joins them without asking another one.

Blocks that are at most half full are multiplied as blocks of half the size. Each size has a loop of
its own, and so has each partition, 5.5 KB each, and all of them have to fit into a processor's
cache of instructions: with four partitions of a warpgroup everything took half as long again.

In Gluon, a language in Triton that says which warps do what and when. It cannot be interpreted;
`tests/kernels/test_hopper_narrow.py` runs this source by a model of the language.
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
from triton.language.extra.cuda import gdc_launch_dependents

from quire.kernels.activation import Gating
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.experts.gating import gating_of
from quire.kernels.triton.experts.hopper_copies import passed_on
from quire.kernels.triton.experts.hopper_narrow_copies import (
    first_unit,
    last_unit,
    load_rows,
    load_tokens,
    time_of,
)
from quire.kernels.triton.experts.hopper_results import finish, halves
from quire.kernels.triton.experts.hopper_unpack import left_factors, packed_parts
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

LEAST, MOST = 16, 64  # pairs of a block
PART = 64  # rows of weights that are fetched together: half a unit
STEP = 64  # elements of a quarter that are fetched together
_PARTITIONS = 2  # of warps that compute
_WARPS: gl.constexpr = gl.constexpr(8)  # of a partition
_MOST_STAGES = 5
_SHARED_MEMORY = 227 << 10
_REGISTERS = 112  # of a thread that computes; one that fetches needs few


def product(
    x: Tensor,
    weights: FourBitExperts,
    blocks: Blocks,
    activation: Gating | None,
    bias: Tensor | None,
) -> Tensor:
    """Of tokens block by block (`by_block` in `gather.py`), at most 64 pairs in a block, and E2M1
    codes. With an activation the results are block by block too, for the next product. Otherwise
    they are token by token: what goes nowhere is left as it was."""
    codes, words = weights[:2]
    gated = activation is not None
    features = codes.shape[1] // (2 if gated else 1)
    rows = blocks.rows if gated else len(blocks.order)
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    units = cdiv(features, PART if gated else 2 * PART)
    few = max(LEAST, blocks.size // 2)
    _multiply[(min(processors(x.device), blocks.number * units),)](
        _tiles(x, blocks.size, gl.bfloat16),
        _tiles(x, few, gl.bfloat16),
        _tiles(codes.flatten(0, 1), PART, gl.int16),
        words,
        out if bias is None else bias,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        units,
        features,
        codes.shape[2],
        GATED=gated,
        BIASED=bias is not None,
        **gating_of(activation),
        BLOCK=blocks.size,
        FEW=few,
        STAGES=stages_of(blocks.size),
        REGISTERS=_REGISTERS,
        num_warps=_WARPS.value,
        **pdl_launch(x.device),
    )
    return out


def _tiles(rows: Tensor, height: int, dtype: gl.dtype) -> TensorDescriptor:
    shape = [height, STEP]
    return TensorDescriptor.from_tensor(
        rows, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype)
    )


def stages_of(block: int) -> int:
    """As many as there is memory for, beside that in which results change their order."""
    rows = _PARTITIONS * 2 * PART
    codes, words, tokens = rows * 2 * STEP, rows * 2 * 4, block * 4 * STEP * 2
    results = rows // 2 * block * 2
    return min(_MOST_STAGES, (_SHARED_MEMORY - results - 1024) // (codes + words + tokens))


@gluon.jit(do_not_specialize=["most", "units"])
def _multiply(
    inputs,
    few_inputs,
    codes,
    words,
    bias,
    out,
    order,
    table,
    most,
    units,
    features,
    quarter,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    FEW: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    xs = gl.allocate_shared_memory(gl.bfloat16, [4 * STAGES, BLOCK, 64], inputs.layout)
    cs = gl.allocate_shared_memory(gl.int16, [4 * STAGES, 64, 64], codes.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ws = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 128], plain)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    has_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=34)  # two units, and what each thread copies of words
        mbarrier.init(has_x.index(i), count=1)
        mbarrier.init(free.index(i), count=2)  # when both partitions are done with it
    if PDL:
        gdc_launch_dependents()
    mine, end = _share(table, most, units, BLOCK, FEW)
    gl.warp_specialize(
        [
            (_compute, (
                bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units,
                features, quarter, 0, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, FEW,
                STAGES,
            )),
            (_compute, (
                bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units,
                features, quarter, 1, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, FEW,
                STAGES,
            )),
            (load_rows, (
                codes, words, table, cs, ws, has, free, mine, end, most, units, features, quarter,
                GATED, BLOCK, FEW, STAGES,
            )),
            (load_tokens, (
                inputs, few_inputs, table, xs, has_x, free, mine, end, most, units, quarter,
                BLOCK, FEW, STAGES, PDL,
            )),
        ],
        [_WARPS, 1, 1],
        [REGISTERS, 32, 32],
    )  # fmt: skip


@gluon.jit
def _share(table, most, units, BLOCK: gl.constexpr, FEW: gl.constexpr):
    """Where, in what all units of all blocks take, this program begins, and where it ends."""
    lane = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [8], [0]))
    total = 0
    for start in range(0, most, 256):
        block = start + lane
        expert = gl.load(table + block, mask=block < most, other=-1)
        begin = gl.load(table + most + block, mask=block < most, other=0)
        end = gl.load(table + 2 * most + block, mask=block < most, other=0)
        total += gl.sum(gl.where(expert >= 0, time_of(end - begin, BLOCK, FEW), 0), 0)
    number, programs = gl.program_id(0), gl.num_programs(0)
    return total * units * number // programs, total * units * (number + 1) // programs


@gluon.jit
def _compute(
    bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units,
    features, quarter,
    PARTITION: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK: gl.constexpr,
    FEW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    of_unit: gl.constexpr = 64 if GATED else 128
    # What is computed of these is not kept in registers for all warps of the program.
    most, units, quarter = passed_on(most), passed_on(units), passed_on(quarter)
    steps = (quarter + 63) // 64
    step = 0
    before = 0  # what the blocks before this one take
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            begin = gl.load(table + most + block)
            behind = gl.load(table + 2 * most + block)
            time = time_of(behind - begin, BLOCK, FEW)
            last = last_unit(end - before, time, units)
            for first in range(first_unit(mine - before, time), last, 2):
                if first + PARTITION < last:
                    row = (first + PARTITION) * of_unit
                    if behind - begin <= FEW:
                        _unit(
                            bias, out, order, xs, cs, ws, has, has_x, free, step, block * BLOCK,
                            begin, behind, expert, row, features, quarter,
                            PARTITION, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, FEW, STAGES,
                        )  # fmt: skip
                    elif FEW < BLOCK:
                        _unit(
                            bias, out, order, xs, cs, ws, has, has_x, free, step, block * BLOCK,
                            begin, behind, expert, row, features, quarter,
                            PARTITION, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES,
                        )  # fmt: skip
                else:
                    _leave(has, free, step, steps, STAGES)
                # Not so passed on, each block would begin at 0, and the warps wait for ever.
                step = passed_on(step + steps)
            before = passed_on(before + units * time)


@gluon.jit
def _unit(
    bias, out, order, xs, cs, ws, has, has_x, free, step, place, begin, end, expert, first,
    features, quarter,
    PARTITION: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GELU: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The results of 128 rows of weights and the first pairs of a block."""
    total = _sums(xs, cs, ws, has, has_x, free, step, quarter, PARTITION, PAIRS, STAGES)
    one, other = halves(total)
    finish(
        one, other, bias, out, order, place, begin, end, expert, first, features,
        GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, _WARPS,
    )  # fmt: skip


@gluon.jit
def _leave(has, free, step, steps, STAGES: gl.constexpr):
    """To the other partition what is fetched for it."""
    for i in range(step, step + steps):
        mbarrier.wait(has.index(i % STAGES), (i // STAGES) & 1)
        mbarrier.arrive(free.index(i % STAGES), count=1)


@gluon.jit
def _sums(
    xs, cs, ws, has, has_x, free, step, quarter,
    PARTITION: gl.constexpr,
    PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Of 128 rows of weights and the first pairs of a block."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, PAIRS, 16])
    total = gl.zeros([128, PAIRS], gl.float32, sums)
    for i in range(step, step + quarter // 64):
        at = i % STAGES
        mbarrier.wait(has.index(at), (i // STAGES) & 1)
        parts = packed_parts(cs, ws, at, 0, PARTITION)
        a, b = left_factors(parts, 0, sums)
        mbarrier.wait(has_x.index(at), (i // STAGES) & 1)
        total = _multiplied(a, b, xs, at, 0, 0, PAIRS, total)
        c, d = left_factors(parts, 1, sums)
        total = _multiplied(c, d, xs, at, 1, 0, PAIRS, total)
        parts = packed_parts(cs, ws, at, 1, PARTITION)
        a, b = warpgroup_mma_wait(2, deps=[a, b])
        a, b = left_factors(parts, 0, sums)
        total = _multiplied(a, b, xs, at, 0, 1, PAIRS, total)
        c, d = warpgroup_mma_wait(2, deps=[c, d])
        c, d = left_factors(parts, 1, sums)
        total = _multiplied(c, d, xs, at, 1, 1, PAIRS, total)
        total, a, b, c, d = warpgroup_mma_wait(0, deps=[total, a, b, c, d])
        mbarrier.arrive(free.index(at), count=1)
    # One step at most, where a quarter ends in the middle of it.
    for i in range(step + quarter // 64, step + (quarter + 63) // 64):
        at = i % STAGES
        mbarrier.wait(has.index(at), (i // STAGES) & 1)
        parts = packed_parts(cs, ws, at, 0, PARTITION)
        a, b = left_factors(parts, 0, sums)
        mbarrier.wait(has_x.index(at), (i // STAGES) & 1)
        total = _multiplied(a, b, xs, at, 0, 0, PAIRS, total)
        c, d = left_factors(parts, 1, sums)
        total = _multiplied(c, d, xs, at, 1, 0, PAIRS, total)
        total, a, b, c, d = warpgroup_mma_wait(0, deps=[total, a, b, c, d])
        mbarrier.arrive(free.index(at), count=1)
    return total


@gluon.jit
def _multiplied(a, b, xs, at, HALF: gl.constexpr, SUB: gl.constexpr, PAIRS: gl.constexpr, total):
    """The sums so far and the products of two quarters, which are under way."""
    x = xs.index(4 * at + 2 * HALF).slice(0, PAIRS, 0).slice(32 * SUB, 32, 1).permute((1, 0))
    y = xs.index(4 * at + 2 * HALF + 1).slice(0, PAIRS, 0).slice(32 * SUB, 32, 1).permute((1, 0))
    total = warpgroup_mma(a, x, total, is_async=True)
    return warpgroup_mma(b, y, total, is_async=True)
