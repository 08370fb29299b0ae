"""The warps of `hopper_narrow.py` that copy: one codes and exponents, the other tokens.

They walk over blocks and tiles as the warps do that compute, and tell them by barriers what is
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

from quire.kernels.triton.experts.hopper_copies import passed_on
from quire.kernels.triton.gluon_names import copy_async, tma_load


@gluon.jit
def load_rows(
    codes, words, table, cs, ws, has, free, most, across, features, quarter,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    most, across, quarter = passed_on(most), passed_on(across), passed_on(quarter)
    height = features * 2 if GATED else features
    between = features if GATED else 128  # the two parts of a tile
    of_tile: gl.constexpr = 128 if GATED else 256
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [1], [0]))
    groups = quarter // 32
    steps = (quarter + 63) // 64
    programs = gl.num_programs(0)
    mine = gl.program_id(0)  # the first tile of a block that is this program's
    step = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            for tile in range(mine, across, programs):
                first = tile * of_tile
                of_expert = words + expert.to(gl.int64) * height * groups
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 2 * codes.block_type.nbytes)
                    for part in gl.static_range(2):
                        row = first + part * between
                        tma_load(
                            codes, [expert * height + row, k * 64], bar, cs.index(2 * at + part)
                        )
                        for sub in gl.static_range(2):
                            group = gl.minimum(2 * k + sub, groups - 1)
                            source = of_expert + group * height + row + lane
                            to = ws.index(4 * at + 2 * part + sub)
                            copy_async(to, source, mask=row + lane < height)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    step += 1
            mine = passed_on((mine + programs - across % programs) % programs)


@gluon.jit
def load_tokens(
    inputs, table, xs, has, free, most, across, quarter,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    most, across, quarter = passed_on(most), passed_on(across), passed_on(quarter)
    steps = (quarter + 63) // 64
    programs = gl.num_programs(0)
    mine = gl.program_id(0)
    step = 0
    if PDL:
        gdc_wait()
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            begin = gl.load(table + most + block)
            for _ in range(mine, across, programs):
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 4 * inputs.block_type.nbytes)
                    for i in gl.static_range(4):
                        tma_load(inputs, [begin, i * quarter + k * 64], bar, xs.index(4 * at + i))
                    step += 1
            mine = passed_on((mine + programs - across % programs) % programs)
