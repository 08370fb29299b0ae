"""What a warpgroup (four warps) computes on a Hopper GPU: the attention of 64 rows (`hopper.py`).

Row r is token r // group, head r % group. Keys may have a second part, of ROPE features, which all
heads share (DeepSeek's expanded latents); with none, what stands for it is not looked at. Keys are
walked backwards, so that only the first tiles, those around the diagonal, are masked. While the
tensor cores multiply the weights of one tile by V, the softmax of the next is under way:

    tensor cores   | K 0 |       | K 1 | V 0 | | K 2 | V 1 |
    the rest             | exp 0 |     | exp 1 |     | exp 2 |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.triton.attention.softmax import LOG2_E

_LOG2_E: gl.constexpr = gl.constexpr(LOG2_E)


@gluon.jit
def compute(
    q,
    out,
    sinks,
    ks,
    ropes,
    vs,
    has_k,
    has_v,
    free_k,
    free_v,
    row,
    tokens,
    position,
    tiles,
    kv_head,
    scale,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROPE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SINKS: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Attend 64 rows; `position` is that of the job's first token, `tiles` all that it can see."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    memory: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    lane = WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, memory))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, memory))
    live = (lane // GROUP < tokens)[:, None]
    rows = row + lane // GROUP
    heads = kv_head * GROUP + lane % GROUP
    starts = (rows * q_row_stride + heads * q_head_stride)[:, None]
    query = gl.load(q + starts + dims[None, :], mask=live, other=0.0)
    query = gl.convert_layout(query, gl.DotOperandLayout(0, scores, 2))
    query_rope = ks
    if ROPE > 0:  # in shared memory: registers are all taken
        turned = HEAD_DIM + gl.arange(0, ROPE, layout=gl.SliceLayout(0, memory))
        numbers = gl.load(q + starts + turned[None, :], mask=live, other=0.0)
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROPE], numbers.dtype)
        query_rope = gl.allocate_shared_memory(numbers.dtype, [64, ROPE], shared, numbers)
        fence_async_shared()
    place = WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    seer = position + place // GROUP
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, scores))
    acc = gl.zeros([64, HEAD_DIM], gl.float32, sums)
    none = gl.zeros([64, KEYS], gl.float32, scores)

    mbarrier.wait(has_k.index(0), 0)
    s = _scores(query, query_rope, ks.index(0), ropes, 0, none, ROPE)
    s, query = warpgroup_mma_wait(0, deps=[s, query])
    mbarrier.arrive(free_k.index(0), count=1)
    weights, _, top, total = _softmax(
        s, top, total, scale, seer, (tiles - 1) * KEYS, KEYS, scores, True
    )
    weights = gl.convert_layout(weights.to(q.dtype.element_ty), gl.DotOperandLayout(0, sums, 2))
    mbarrier.wait(has_v.index(0), 0)

    # All rows see all keys of the tiles before this one. Two loops, for a branch in one would keep
    # the compiler from letting products and softmax overlap.
    masked = gl.maximum(tiles - (position + 1) // KEYS, 1)
    for i in range(1, masked):
        acc, weights, query, top, total = _turn(
            i, query, query_rope, weights, none, acc, top, total, ks, ropes, vs,
            has_k, has_v, free_k, free_v, scale, seer, tiles,
            ROPE, KEYS, STAGES, scores, sums, True,
        )  # fmt: skip
    for i in range(masked, tiles):
        acc, weights, query, top, total = _turn(
            i, query, query_rope, weights, none, acc, top, total, ks, ropes, vs,
            has_k, has_v, free_k, free_v, scale, seer, tiles,
            ROPE, KEYS, STAGES, scores, sums, False,
        )  # fmt: skip

    acc = warpgroup_mma(weights, vs.index((tiles - 1) % STAGES), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    if SINKS:
        sink = gl.load(sinks + kv_head * GROUP + place % GROUP).to(gl.float32)
        total += gl.exp2(sink * _LOG2_E - top)
    value = acc / gl.convert_layout(total, gl.SliceLayout(1, sums))[:, None]
    value = gl.convert_layout(value.to(out.dtype.element_ty), memory)
    offsets = (rows * out_row_stride + heads * out_head_stride)[:, None] + dims[None, :]
    gl.store(out + offsets, value, mask=live)


@gluon.jit
def _turn(
    i,
    query,
    query_rope,
    weights,
    none,
    acc,
    top,
    total,
    ks,
    ropes,
    vs,
    has_k,
    has_v,
    free_k,
    free_v,
    scale,
    seer,
    tiles,
    ROPE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    scores: gl.constexpr,
    sums: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Multiply by the K of the i-th tile and the V of the one before; weigh the i-th meanwhile."""
    at = i % STAGES
    before = (i - 1) % STAGES
    phase = (i // STAGES) & 1
    mbarrier.wait(has_k.index(at), phase)
    s = _scores(query, query_rope, ks.index(at), ropes, at, none, ROPE)
    acc = warpgroup_mma(weights, vs.index(before), acc, is_async=True)
    s, query = warpgroup_mma_wait(1, deps=[s, query])
    mbarrier.arrive(free_k.index(at), count=1)
    ahead, fade, top, total = _softmax(
        s, top, total, scale, seer, (tiles - 1 - i) * KEYS, KEYS, scores, MASKED
    )
    ahead = gl.convert_layout(ahead.to(weights.dtype), gl.DotOperandLayout(0, sums, 2))
    # Waiting for the next V here, not where it is used, ends a block of instructions: the
    # assembler would move the softmax behind the wait for the products otherwise.
    mbarrier.wait(has_v.index(at), phase)
    acc, weights, ahead = warpgroup_mma_wait(0, deps=[acc, weights, ahead])
    mbarrier.arrive(free_v.index(before), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, sums))[:, None]
    return acc, ahead, query, top, total


@gluon.jit
def _scores(query, query_rope, k, ropes, at, none, ROPE: gl.constexpr):
    """Begin to multiply q with a tile of keys, with both of their parts."""
    s = warpgroup_mma(query, k.permute((1, 0)), none, use_acc=False, is_async=True)
    if ROPE > 0:
        s = warpgroup_mma(query_rope, ropes.index(at).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _softmax(
    s,
    top,
    total,
    scale,
    seer,
    first,
    KEYS: gl.constexpr,
    scores: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One step of the online softmax, as in `tiles.py`; its first key is at `first`."""
    if MASKED:
        keys = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores))
        s = gl.where(keys[None, :] <= seer[:, None], s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    base = new_top
    if MASKED:  # a row that has seen nothing yet has no top: -inf less -inf would be NaN
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * scale - base[:, None])
    fade = gl.exp2(top - base)
    return weights, fade, new_top, total * fade + gl.sum(weights, 1)
