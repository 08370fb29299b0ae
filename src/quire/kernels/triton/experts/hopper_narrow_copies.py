"""The warps of `hopper_narrow.py` that copy: one codes and exponents, the other tokens.

They walk over blocks and units as the warps do that compute, and tell them by barriers what is
there; those tell them what is free. Codes are copied while the kernel before this one still runs,
whose results are tokens. These lie block by block (`by_block` in `gather.py`).

Where a quarter ends in the middle of a step, codes beyond it are 0, exponents are those of its last
elements again, and tokens have what lies behind; nothing of that is multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_wait

from quire.kernels.triton.experts.hopper_copies import passed_on
from quire.kernels.triton.gluon_names import copy_async, tma_load


@gluon.jit
def pairs_of(table, most, block):
    return gl.load(table + 2 * most + block) - gl.load(table + most + block)


@gluon.jit
def time_of(pairs, BLOCK: gl.constexpr, FEW: gl.constexpr):
    """What a unit of a block takes. Tensor cores whose left factor lies in registers take 28 cycles
    for 64 of its rows and 16 columns, and 0.3 more for each pair: 93 times 0.3, and as often again
    as there are pairs. Sums of these stay below 2 ** 31 with 100,000 units and 132 processors."""
    return gl.where(pairs <= FEW, 93 + FEW, 93 + BLOCK)


@gluon.jit
def first_unit(begin, time):
    """The first of a block's units that begins at `begin` or later."""
    return gl.maximum((begin + time - 1) // time, 0)


@gluon.jit
def last_unit(end, time, units):
    """The one behind the last that begins before `end`."""
    return gl.minimum((end + time - 1) // time, units)


@gluon.jit
def load_rows(
    codes, words, table, cs, ws, has, free, mine, end, most, units, features, quarter,
    GATED: gl.constexpr,
    BLOCK: gl.constexpr,
    FEW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    most, units, quarter = passed_on(most), passed_on(units), passed_on(quarter)
    height = features * 2 if GATED else features
    between = features if GATED else 64  # the two parts of a unit
    of_unit: gl.constexpr = 64 if GATED else 128
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [1], [0]))
    groups = quarter // 32
    steps = (quarter + 63) // 64
    step = 0
    before = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            time = time_of(pairs_of(table, most, block), BLOCK, FEW)
            last = last_unit(end - before, time, units)
            of_expert = words + expert.to(gl.int64) * height * groups
            for first in range(first_unit(mine - before, time), last, 2):
                together = gl.minimum(last - first, 2)
                rows = (first + lane // 64) * of_unit + lane % 64
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    for i in gl.static_range(2):
                        if i < together:
                            mbarrier.expect(bar, 2 * codes.block_type.nbytes)
                            top = expert * height + (first + i) * of_unit
                            to = 4 * at + 2 * i
                            tma_load(codes, [top, k * 64], bar, cs.index(to))
                            tma_load(codes, [top + between, k * 64], bar, cs.index(to + 1))
                        else:
                            mbarrier.arrive(bar, count=1)
                    for part in gl.static_range(2):
                        row = part * between + rows
                        live = (lane < 64 * together) & (row < height)
                        for sub in gl.static_range(2):
                            group = gl.minimum(2 * k + sub, groups - 1)
                            to = ws.index(4 * at + 2 * part + sub)
                            copy_async(to, of_expert + group * height + row, mask=live)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    step += 1
            before = passed_on(before + units * time)


@gluon.jit
def load_tokens(
    inputs, few_inputs, table, xs, has, free, mine, end, most, units, quarter,
    BLOCK: gl.constexpr,
    FEW: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    most, units, quarter = passed_on(most), passed_on(units), passed_on(quarter)
    steps = (quarter + 63) // 64
    step = 0
    before = 0
    if PDL:
        gdc_wait()
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            pairs = pairs_of(table, most, block)
            time = time_of(pairs, BLOCK, FEW)
            last = last_unit(end - before, time, units)
            for _ in range(first_unit(mine - before, time), last, 2):
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    if pairs <= FEW:
                        _copy(few_inputs, block * BLOCK, k, quarter, xs, at, bar)
                    else:
                        _copy(inputs, block * BLOCK, k, quarter, xs, at, bar)
                    step += 1
            before = passed_on(before + units * time)


@gluon.jit
def _copy(inputs, row, k, quarter, xs, at, bar):
    """Of a block's first tokens, as many as a tile has, 64 numbers of each quarter."""
    rows: gl.constexpr = inputs.block_type.shape[0]
    mbarrier.expect(bar, 4 * inputs.block_type.nbytes)
    for i in gl.static_range(4):
        to = xs.index(4 * at + i).slice(0, rows, 0)
        tma_load(inputs, [row, i * quarter + k * 64], bar, to)
