"""A variant for the lab: tiles go through a ring in shared memory, a few ahead.

Each thread copies what it will read itself, 16 bytes at a time: what is under way needs no
register.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quire.kernels.triton.attention.fp8_words import (
    PIECE,
    in_order,
    key_starts,
    partial_layout,
    product_layout,
    result_layout,
    score_layout,
    value_starts,
    value_words,
    without,
)
from quire.kernels.triton.attention.hopper_fp8_decode import (
    _DIMS,
    _FIELDS,
    _LOG2_E,
    _PIECE,
    _ROWS,
    _WORDS,
    _add,
    _fetch_tile,
    _find,
    _load_query,
    _multiply,
    _scale,
    _slots,
    _wait_then_trigger,
)
from quire.kernels.triton.attention.softmax import scoring_arguments
from quire.kernels.triton.pdl import pdl_launch

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class RingShape(NamedTuple):
    tile: int
    registers: int
    programs: int
    stages: int


SHAPE = RingShape(16, 128, 16, 3)


def attend(q, pages, batch, splits, scoring, out, just_split, shape) -> None:
    words, scales = pages.k.view(torch.int32), pages.k_scales
    heads, kv_heads = q.shape[1], pages.kv_heads
    _attend[(kv_heads, splits.count)](
        q, out, splits.table, splits.values, splits.lse, batch.block_tables,
        *scoring_arguments(scoring, q), *q.stride()[:2],
        words, words.stride(0), pages.k_to_v // 4, words.stride(1),
        scales, pages.k_to_v_scales, scales.stride(1),
        *out.stride()[:2], batch.block_tables.stride(0), just_split, heads // kv_heads,
        HEADS=heads, GROUP=heads // kv_heads, BLOCK_SIZE=pages.block_size,
        PIECES=shape.tile // PIECE, CAPPED=scoring.softcap is not None,
        SINKS=scoring.sinks is not None, STAGES=shape.stages,
        num_warps=1, maxnreg=shape.registers, **pdl_launch(q.device),
    )  # fmt: skip


@gluon.constexpr_function
def key_ring(pieces: int) -> Any:
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@gluon.constexpr_function
def scale_ring() -> Any:
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def value_ring(pieces: int) -> Any:
    """As threads are numbered, for each reads what lies beside the one before it."""
    return gl.SharedLinearLayout(
        [
            *[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
            *[[1, 0, 0], [2, 0, 0]][: pieces // 2],
        ]
    )


@gluon.constexpr_function
def scale_copy(pieces: int) -> Any:
    """One number a thread, `[pieces, PIECE]`; half of them, or more than one, as it comes."""
    return gl.BlockedLayout([1, 1], [2, 16], [1, 1], [1, 0])


@gluon.jit
def fetch(head_pages, head_values, head_scales, value_scales, starts, slots, ks, vs, ss, stage,
          PIECES: gl.constexpr):  # fmt: skip
    keys: gl.constexpr = key_starts(PIECES)
    tokens = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(0, keys)))
    words = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, keys)))
    at = (tokens * _WORDS)[:, None] + words[None, :]
    each: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, keys))
    begin = gl.convert_layout(starts + slots * _WORDS, each, assert_trivial=True)
    k = (head_pages + begin)[:, None, None] + at[None, :, :]
    _copy(ks[0].index(stage), k)
    _copy(ks[1].index(stage), k + 16)
    _copy(ks[2].index(stage), k + 8 * _WORDS)
    _copy(ks[3].index(stage), k + (8 * _WORDS + 16))
    vals: gl.constexpr = value_starts(PIECES)
    tokens = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(0, vals)))
    words = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, vals)))
    at = (tokens * (2 * _WORDS))[:, None] + words[None, :]
    each_v: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, vals))
    begin = gl.convert_layout(starts + slots * _WORDS, each_v, assert_trivial=True)
    v = (head_values + begin)[:, None, None] + at[None, :, :]
    _copy(vs[0].index(stage), v)
    _copy(vs[1].index(stage), v + _WORDS)
    _copy(vs[2].index(stage), v + 8 * _WORDS)
    _copy(vs[3].index(stage), v + 9 * _WORDS)
    flat: gl.constexpr = scale_copy(PIECES)
    numbers = gl.arange(0, _PIECE, layout=gl.SliceLayout(0, flat))
    begin = gl.convert_layout(starts + slots, gl.SliceLayout(1, flat))
    _copy(ss[0].index(stage), (head_scales + begin)[:, None] + numbers[None, :])
    _copy(ss[1].index(stage), (value_scales + begin)[:, None] + numbers[None, :])
    async_copy.commit_group()


@gluon.jit
def taken(ks, vs, ss, stage, PIECES: gl.constexpr):
    keys: gl.constexpr = key_starts(PIECES)
    a, b = ks[0].index(stage).load(keys), ks[1].index(stage).load(keys)
    c, d = ks[2].index(stage).load(keys), ks[3].index(stage).load(keys)
    parts = gl.join(gl.join(a, b), gl.join(c, d))
    k = gl.reshape(gl.permute(parts, (0, 4, 1, 3, 2)), [PIECES * _PIECE, _WORDS])
    vals: gl.constexpr = value_starts(PIECES)
    a, b = vs[0].index(stage).load(vals), vs[1].index(stage).load(vals)
    c, d = vs[2].index(stage).load(vals), vs[3].index(stage).load(vals)
    parts = gl.join(gl.join(a, b), gl.join(c, d))
    v = gl.reshape(gl.permute(parts, (0, 4, 1, 3, 2)), [PIECES * _PIECE, _WORDS])
    v = gl.convert_layout(v, value_words(PIECES), assert_trivial=True)
    return k, v, scales_of(ss[0].index(stage), PIECES), scales_of(ss[1].index(stage), PIECES)


@gluon.jit
def scales_of(held, PIECES: gl.constexpr):
    layout: gl.constexpr = scale_read(PIECES)
    found = gl.reshape(held.load(layout), [PIECES * _PIECE])
    return gl.convert_layout(found, gl.SliceLayout(0, score_layout(PIECES)), assert_trivial=True)


@gluon.constexpr_function
def scale_read(pieces: int) -> Any:
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8], *[[1, 0], [2, 0]][: pieces // 2]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [],
        [],
        [pieces, PIECE],
    )


@gluon.jit(do_not_specialize=["table_stride", "just_split", "group"])
def _attend(
    q,
    out,
    splits_table,
    values,
    lse,
    block_tables,
    scale,
    cap,
    sinks,
    q_row_stride,
    q_head_stride,
    pages,
    block_stride,
    kv_stride,
    head_stride,
    scales,
    scale_kv_stride,
    scale_head_stride,
    out_row_stride,
    out_head_stride,
    table_stride,
    just_split,
    group,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PIECES: gl.constexpr,
    CAPPED: gl.constexpr,
    SINKS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    TILE: gl.constexpr = PIECES * _PIECE
    if just_split:
        _wait_then_trigger(PDL)
    item = gl.program_id(1)
    field = splits_table + item * _FIELDS
    # All at once, before the first is looked at: waiting for one after the other takes longer.
    sequence = gl.load(field).to(gl.int64)
    row = gl.load(field + 1).to(gl.int64)
    first = gl.load(field + 2)
    end = gl.load(field + 3)
    num_splits = gl.load(field + 4)
    kv_head = gl.program_id(0)
    table = block_tables + sequence * table_stride
    head_pages = pages + kv_head * head_stride
    head_scales = scales + kv_head * scale_head_stride
    if PDL and not just_split:
        if sequence >= 0:
            _fetch_tile(head_pages, table, first, end, block_stride, kv_stride, TILE, BLOCK_SIZE)
        _wait_then_trigger(PDL)
    if sequence < 0:
        return

    scored: gl.constexpr = score_layout(PIECES)
    product: gl.constexpr = product_layout()
    head_values, value_scales = head_pages + kv_stride, head_scales + scale_kv_stride
    # Each a room of its own, else a barrier would part each copy from the next.
    k0 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 8, 16], key_ring(PIECES))
    k1 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 8, 16], key_ring(PIECES))
    k2 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 8, 16], key_ring(PIECES))
    k3 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 8, 16], key_ring(PIECES))
    ks = (k0, k1, k2, k3)
    v0 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 4, 32], value_ring(PIECES))
    v1 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 4, 32], value_ring(PIECES))
    v2 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 4, 32], value_ring(PIECES))
    v3 = gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, 4, 32], value_ring(PIECES))
    vs = (v0, v1, v2, v3)
    s0 = gl.allocate_shared_memory(gl.float32, [STAGES, PIECES, _PIECE], scale_ring())
    s1 = gl.allocate_shared_memory(gl.float32, [STAGES, PIECES, _PIECE], scale_ring())
    ss = (s0, s1)
    query = _load_query(q + row * q_row_stride, kv_head, q_head_stride, group, GROUP)
    following = _find(table, first, end, block_stride, PIECES, BLOCK_SIZE)
    for i in gl.static_range(STAGES - 1):
        starts = following
        following = _find(table, first + (i + 1) * TILE, end, block_stride, PIECES, BLOCK_SIZE)
        slots = _slots(first + i * TILE, PIECES, BLOCK_SIZE)
        fetch(
            head_pages, head_values, head_scales, value_scales, starts, slots, ks, vs, ss, i, PIECES
        )
    top = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scored))
    totals = gl.zeros([_ROWS, 4], gl.float32, partial_layout())
    acc = gl.zeros([_DIMS, _ROWS], gl.float32, product)
    stage = 0
    ahead = STAGES - 1
    for begin in range(first + TILE, end, TILE):
        starts = following
        at = begin + (STAGES - 2) * TILE
        following = _find(table, at + TILE, end, block_stride, PIECES, BLOCK_SIZE)
        slots = _slots(at, PIECES, BLOCK_SIZE)
        async_copy.wait_group(STAGES - 2)
        k, v, k_scale, v_scale = taken(ks, vs, ss, stage, PIECES)
        fetch(
            head_pages,
            head_values,
            head_scales,
            value_scales,
            starts,
            slots,
            ks,
            vs,
            ss,
            ahead,
            PIECES,
        )
        scores = _multiply(query, k, PIECES)
        scores, inverse = _scale(scores, k_scale, v_scale, scale, cap, CAPPED)
        new_top = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - new_top[:, None])
        totals, acc = _add(v, weights, inverse, gl.exp2(top - new_top), totals, acc, PIECES)
        top = new_top
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        ahead = gl.where(ahead == STAGES - 1, 0, ahead + 1)
    async_copy.wait_group(0)
    k, v, k_scale, v_scale = taken(ks, vs, ss, stage, PIECES)

    # The last tile: what is past the end may be anything.
    begin = first + gl.maximum(end - first - 1, 0) // TILE * TILE
    live = begin + gl.arange(0, TILE, layout=gl.SliceLayout(0, scored)) < end
    v_scale = gl.where(live, v_scale, 0.0)
    scores, inverse = _scale(_multiply(query, k, PIECES), k_scale, v_scale, scale, cap, CAPPED)
    scores = gl.where(live[None, :], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf less -inf would be NaN
    weights = gl.exp2(scores - base[:, None])
    v = without(v, live, PIECES)
    totals, acc = _add(v, weights, inverse, gl.exp2(top - base), totals, acc, PIECES)
    total = gl.convert_layout(gl.sum(totals, 1), gl.SliceLayout(1, scored))

    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, scored))
    if SINKS and num_splits == 1:
        sink = gl.load(sinks + kv_head * GROUP + rows, mask=rows < GROUP, other=0.0)
        total = total + gl.exp2(sink.to(gl.float32) * _LOG2_E - new_top)
    total = gl.where(total == 0.0, 1.0, total)
    divisor = gl.convert_layout(total, gl.SliceLayout(0, product))
    value = in_order(acc / divisor[None, :])
    results: gl.constexpr = result_layout()
    dims = gl.arange(0, _DIMS, layout=gl.SliceLayout(0, results))
    result_rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, results))
    head = kv_head * GROUP + result_rows
    live = (result_rows < GROUP)[:, None]
    if num_splits == 1:
        at = row * out_row_stride + (head * out_head_stride)[:, None] + dims[None, :]
        gl.store(out + at, value.to(out.dtype.element_ty), mask=live)
    else:
        place = item.to(gl.int64) * HEADS
        log = new_top + gl.log2(total)
        gl.store(lse + place + kv_head * GROUP + rows, log, mask=rows < GROUP)
        at = place * _DIMS + (head * _DIMS)[:, None] + dims[None, :]
        gl.store(values + at, value, mask=live)
