"""The warp of `hopper_fours.py` that copies codes, exponents and tokens.

It walks over blocks and tiles as the warps do that compute, and tells them by barriers what is
there; they tell it what is free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from quire.kernels.triton.gluon_names import copy_async, tma_load


@gluon.jit
def passed_on(number):
    """The same, for the next turn of a loop, where Triton 3.6 would take it for the first turn's:
    when it inlines functions, it does not see all that an `if` changes."""
    asm: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load(
    inputs, codes, words, table, xs, cs, ws, has, free, most, across, features, quarter,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    height = features * 2 if GATED else features
    between = features if GATED else 64  # the two halves of a warpgroup
    of_group: gl.constexpr = 64 if GATED else 128
    lane = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    steps = quarter // 32
    programs = gl.num_programs(0)
    mine = gl.program_id(0)  # the first tile of a block that is this program's
    step = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            begin = gl.load(table + most + block)
            for tile in range(mine, across, programs):
                first = tile * (2 * of_group)
                source = words + expert.to(gl.int64) * height * steps
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 4 * (codes.block_type.nbytes + inputs.block_type.nbytes))
                    for i in gl.static_range(4):
                        row = first + i // 2 * of_group + i % 2 * between
                        tma_load(codes, [expert * height + row, k * 32], bar, cs.index(4 * at + i))
                        tma_load(inputs, [begin, i * quarter + k * 32], bar, xs.index(4 * at + i))
                        copy_async(
                            ws.index(4 * at + i), source + row + lane, mask=row + lane < height
                        )
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    source += height
                    step += 1
            mine = passed_on((mine + programs - across % programs) % programs)
