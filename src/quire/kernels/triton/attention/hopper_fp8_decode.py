"""Attention of one new token over KV in fp8, on Hopper GPUs: as fast as its bytes are read.

A program is one warp, and has one split of one sequence's tokens for one KV head, as in
`decode.py`. What it reads goes into registers (`fp8_words.py`), a tile ahead: K's as soon as this
tile's is multiplied, V's likewise. So each program needs few instructions for a tile and no
barrier, and a processor holds many programs, of which some compute while others wait.

In Gluon, a language in Triton that says which thread holds what. It cannot be interpreted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LayerPages
from quire.kernels.scoring import Scoring
from quire.kernels.triton.attention.fp8_words import (
    HEAD_DIM,
    PIECE,
    ROWS,
    first_rows,
    in_order,
    key_operand,
    load_keys,
    load_scales,
    load_values,
    partial_layout,
    piece_layout,
    product_layout,
    query_layout,
    query_operand,
    result_layout,
    score_layout,
    value_operand,
    weight_operand,
    without,
)
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits
from quire.kernels.triton.attention.softmax import LOG2_E, scoring_arguments
from quire.kernels.triton.pdl import pdl_launch

_PIECE: gl.constexpr = gl.constexpr(PIECE)
_ROWS: gl.constexpr = gl.constexpr(ROWS)
_DIMS: gl.constexpr = gl.constexpr(HEAD_DIM)
_WORDS: gl.constexpr = gl.constexpr(HEAD_DIM // 4)
_FIELDS: gl.constexpr = gl.constexpr(FIELDS.value)
_LOG2_E: gl.constexpr = gl.constexpr(LOG2_E)
# Of a scale, or of 2 ** -100 if it is less: what is V then is nothing, and no inverse too large.
_POWER_AND_INVERSE: gl.constexpr = gl.constexpr("""{
    .reg .f32 scale;
    max.f32 scale, $2, 0f0D800000;
    lg2.approx.ftz.f32 $0, scale;
    rcp.approx.ftz.f32 $1, scale;
}""")
_FETCH: gl.constexpr = gl.constexpr("""{
    .reg .pred wanted;
    setp.ne.b32 wanted, $2, 0;
    @wanted prefetch.global.L2 [$1];
    mov.b32 $0, 0;
}""")


class WordsShape(NamedTuple):
    """Tokens of a tile, registers of a thread, and how many programs a processor then holds."""

    tile: int
    registers: int
    programs: int


SHAPE = WordsShape(32, 255, 8)


def attend(
    q: Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    splits: KVSplits,
    scoring: Scoring,
    out: Tensor,
    just_split: bool,
    shape: WordsShape,
) -> None:
    """As `decode.decode_attention`, before splits are combined."""
    words, scales = pages.k.view(torch.int32), pages.k_scales
    assert scales is not None
    heads, kv_heads = q.shape[1], pages.kv_heads
    _attend[(kv_heads, splits.count)](
        q,
        out,
        splits.table,
        splits.values,
        splits.lse,
        batch.block_tables,
        *scoring_arguments(scoring, q),
        *q.stride()[:2],
        words,
        words.stride(0),
        pages.k_to_v // 4,
        words.stride(1),
        scales,
        pages.k_to_v_scales,
        scales.stride(1),
        *out.stride()[:2],
        batch.block_tables.stride(0),
        just_split,
        heads // kv_heads,
        HEADS=heads,
        GROUP=heads // kv_heads,
        BLOCK_SIZE=pages.block_size,
        PIECES=shape.tile // PIECE,
        CAPPED=scoring.softcap is not None,
        SINKS=scoring.sinks is not None,
        num_warps=1,
        maxnreg=shape.registers,
        **pdl_launch(q.device),
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
    starts = _find(table, first, end, block_stride, PIECES, BLOCK_SIZE)
    following = _find(table, first + TILE, end, block_stride, PIECES, BLOCK_SIZE)
    query = _load_query(q + row * q_row_stride, kv_head, q_head_stride, group, GROUP)
    slots = _slots(first, PIECES, BLOCK_SIZE)
    k = load_keys(head_pages + starts + slots * _WORDS, PIECES)
    k_scale = load_scales(head_scales + starts + slots, PIECES)
    v_scale = load_scales(value_scales + starts + slots, PIECES)
    v = load_values(head_values + starts + slots * _WORDS, PIECES)
    top = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scored))
    totals = gl.zeros([_ROWS, 4], gl.float32, partial_layout())
    acc = gl.zeros([_DIMS, _ROWS], gl.float32, product)
    for begin in range(first + TILE, end, TILE):  # of the tile behind the one that is added
        starts = following
        following = _find(table, begin + TILE, end, block_stride, PIECES, BLOCK_SIZE)
        slots = _slots(begin, PIECES, BLOCK_SIZE)
        scores = _multiply(query, k, PIECES)
        k = load_keys(head_pages + starts + slots * _WORDS, PIECES)
        scores, inverse = _scale(scores, k_scale, v_scale, scale, cap, CAPPED)
        k_scale = load_scales(head_scales + starts + slots, PIECES)
        v_scale = load_scales(value_scales + starts + slots, PIECES)
        new_top = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - new_top[:, None])
        totals, acc = _add(v, weights, inverse, gl.exp2(top - new_top), totals, acc, PIECES)
        v = load_values(head_values + starts + slots * _WORDS, PIECES)
        top = new_top

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


@gluon.jit
def _wait_then_trigger(PDL: gl.constexpr):
    """As in `pdl.py`, whose functions are Triton's."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit
def _fetch_tile(
    head_pages, table, first, end, block_stride, kv_stride,
    TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """As `tiles.fetch_tile`: a head of a token is one line."""
    tokens = first + gl.arange(0, TILE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    live = tokens < end
    blocks = gl.load(table + tokens // BLOCK_SIZE, mask=live, other=0).to(gl.int64)
    lines = head_pages + blocks * block_stride + tokens % BLOCK_SIZE * _WORDS
    wanted = live.to(gl.int32)
    _fetch(lines, wanted)
    _fetch(lines + kv_stride, wanted)


@gluon.jit
def _fetch(lines, wanted):
    gl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [lines.to(gl.int64), wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _find(table, begin, end, block_stride, PIECES: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Where the block of each piece of this tile begins, in words; every thread has them all.
    Pieces past the end are read from block 0, for there always is one, and not counted."""
    pieces = begin + gl.arange(0, PIECES, layout=piece_layout(PIECES)) * _PIECE
    blocks = gl.load(table + pieces // BLOCK_SIZE, mask=pieces < end, other=0)
    return blocks.to(gl.int64) * block_stride


@gluon.jit
def _slots(begin, PIECES: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The slot in its block at which each piece begins."""
    pieces = gl.arange(0, PIECES, layout=piece_layout(PIECES)) * _PIECE
    if BLOCK_SIZE == _PIECE:
        return pieces * 0
    else:
        return (begin + pieces) % BLOCK_SIZE


@gluon.jit
def _load_query(q, kv_head, head_stride, group, GROUP: gl.constexpr):
    """Tensor cores take 16 rows on the left: those past the group are 0. The compiler must not know
    how many there are: it would make zeros anew for every tile."""
    layout: gl.constexpr = query_layout()
    rows = gl.arange(0, 2 * _ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, _DIMS, layout=gl.SliceLayout(0, layout))
    at = q + ((kv_head * GROUP + rows) * head_stride)[:, None] + dims[None, :]
    return query_operand(gl.load(at, mask=(rows < group)[:, None], other=0.0).to(gl.float16))


@gluon.jit
def _multiply(query, k, PIECES: gl.constexpr):
    """Scores `[ROWS, tokens]` of codes, without their scales."""
    none = gl.zeros([2 * _ROWS, PIECES * _PIECE], gl.float32, product_layout())
    return first_rows(mma_v2(query, key_operand(k, PIECES), none), PIECES)


@gluon.jit
def _scale(scores, k_scale, v_scale, scale, cap, CAPPED: gl.constexpr):
    """Scores with the scales of K, and with the logarithms of those of V: so `top` is that of
    weight and scale together, and no weight that matters is too small for float16. The inverses of
    V's scales, too, for the total of weights without them."""
    power, inverse = gl.inline_asm_elementwise(
        _POWER_AND_INVERSE,
        "=f,=f,f",
        [v_scale],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    factor = (k_scale * scale)[None, :]
    if CAPPED:
        scores = cap - 2.0 * cap / (1.0 + gl.exp2(scores * factor * (2.0 * _LOG2_E / cap)))
        scores = scores + power[None, :]
    else:
        scores = scores * factor + power[None, :]
    return scores, inverse


@gluon.jit
def _add(v, weights, inverse, fade, totals, acc, PIECES: gl.constexpr):
    parts = gl.reshape(weights * inverse[None, :], [_ROWS, 2 * PIECES, 4, 2])
    new = gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), partial_layout(), assert_trivial=True)
    totals_fade = gl.convert_layout(fade, gl.SliceLayout(1, partial_layout()), assert_trivial=True)
    totals = totals * totals_fade[:, None] + new
    fade = gl.convert_layout(fade, gl.SliceLayout(0, product_layout()))
    acc = mma_v2(value_operand(v, PIECES), weight_operand(weights), acc * fade[None, :])
    return totals, acc
