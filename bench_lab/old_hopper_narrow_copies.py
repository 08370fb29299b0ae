"""The warps of `hopper_narrow.py` that copy: one codes and exponents, the other tokens.

They walk over blocks and units as the warps do that compute, and tell them by barriers what is
there; those tell them what is free. Codes are copied while the kernel before this one still runs,
whose results are tokens.

Where a quarter ends in the middle of a step, codes beyond it are 0, exponents are those of its last
elements again, and tokens have what lies behind: numbers, which are multiplied by 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_wait

from old_hopper_copies import passed_on
from quire.kernels.triton.gluon_names import copy_async, tma_load


@gluon.jit
def load_rows(
    codes, words, table, cs, ws, has, free, mine, end, most, units, features, quarter,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    most, units, quarter = passed_on(most), passed_on(units), passed_on(quarter)
    height = features * 2 if GATED else features
    between = features if GATED else 32  # the two parts of a unit
    of_unit: gl.constexpr = 32 if GATED else 64
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [1], [0]))
    groups = quarter // 32
    steps = (quarter + 63) // 64
    step = 0
    before = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            last = gl.minimum(end - before, units)
            of_expert = words + expert.to(gl.int64) * height * groups
            for first in range(gl.maximum(mine - before, 0), last, 4):
                together = gl.minimum(last - first, 4)
                rows = (first + lane // 32) * of_unit + lane % 32
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    for i in gl.static_range(4):
                        if i < together:
                            mbarrier.expect(bar, 2 * codes.block_type.nbytes)
                            top = expert * height + (first + i) * of_unit
                            to = 8 * at + 2 * i
                            tma_load(codes, [top, k * 64], bar, cs.index(to))
                            tma_load(codes, [top + between, k * 64], bar, cs.index(to + 1))
                        else:
                            mbarrier.arrive(bar, count=1)
                    for part in gl.static_range(2):
                        row = part * between + rows
                        live = (lane < 32 * together) & (row < height)
                        for sub in gl.static_range(2):
                            group = gl.minimum(2 * k + sub, groups - 1)
                            to = ws.index(4 * at + 2 * part + sub)
                            copy_async(to, of_expert + group * height + row, mask=live)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    step += 1
            before = passed_on(before + units)


@gluon.jit
def load_tokens(
    inputs, table, xs, has, free, mine, end, most, units, quarter,
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
            begin = gl.load(table + most + block)
            last = gl.minimum(end - before, units)
            for _ in range(gl.maximum(mine - before, 0), last, 4):
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 4 * inputs.block_type.nbytes)
                    for i in gl.static_range(4):
                        tma_load(inputs, [begin, i * quarter + k * 64], bar, xs.index(4 * at + i))
                    step += 1
            before = passed_on(before + units)
