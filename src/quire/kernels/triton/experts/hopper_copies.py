"""The warps of `hopper_fours.py` that copy: one codes and exponents, one tokens.

Both walk over blocks and tiles as the warps do that compute, and tell them by barriers what is
there; these tell what is free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# By their names in later versions of Triton, or in the first.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def passed_on(tile):
    """The same, for the next turn of a loop, where Triton 3.6 would take it for the first turn's
    (its pass for common subexpressions does not see what an `if` changes)."""
    asm: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [tile], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_codes(
    codes, words, table, cs, ws, has, free, most, across, features, quarter, turns,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    height = features * 2 if GATED else features
    between = features if GATED else 128  # the two halves
    tile_rows: gl.constexpr = 128 if GATED else 256
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [1], [0]))
    steps = quarter // 32
    programs = gl.num_programs(0)
    mine = gl.program_id(0)  # the first tile of a block that is this program's
    turn = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            for tile in range(mine, across, programs):
                first = tile * tile_rows
                source = words + expert.to(gl.int64) * height * steps + first
                for i in range(turns):
                    at = turn % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((turn // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 2 * codes.block_type.nbytes)
                    for half in gl.static_range(2):
                        row = first + half * between
                        _fetch(codes, [expert * height + row, i * 64], bar, cs.index(2 * at + half))
                        for step in gl.static_range(2):
                            # Behind the last step codes are zeros, and any numbers will do.
                            its_words = source + gl.minimum(2 * i + step, steps - 1) * height
                            _copy(
                                ws.index(4 * at + 2 * step + half),
                                its_words + half * between + lane,
                                mask=row + lane < height,
                            )
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    turn += 1
            mine = passed_on((mine + programs - across % programs) % programs)


@gluon.jit
def load_tokens(
    inputs, table, xs, has_x, free_x, most, across, turns, X_STAGES: gl.constexpr
):  # fmt: skip
    programs = gl.num_programs(0)
    mine = gl.program_id(0)
    step = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            begin = gl.load(table + most + block)
            for _ in range(mine, across, programs):
                for i in range(2 * turns):
                    at = step % X_STAGES
                    bar = has_x.index(at)
                    mbarrier.wait(free_x.index(at), ((step // X_STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 2 * inputs.block_type.nbytes)
                    _fetch(inputs, [begin, i * 128], bar, xs.index(2 * at))
                    _fetch(inputs, [begin, i * 128 + 64], bar, xs.index(2 * at + 1))
                    step += 1
            mine = passed_on((mine + programs - across % programs) % programs)
