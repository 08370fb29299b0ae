"""Attention of rows of q to the tokens that they see, whose K and V are read in their pages.

A row's KV is split, at most `SPLIT` each. A thread takes a split and all its heads:

    scores = q · K      one score for each head and token of the split
    weights = exp(scores - the head's highest score)
    sums = weights · V  with the highest score and the weights' total, the split's result

The thread that finishes the last split of a row combines their results, and adds the head's sink.
"""

from __future__ import annotations

import math

from numpy import float32, int64

from quire.kernels.numba.code.exp import exp
from quire.kernels.numba.code.memory import claim, helper, shift
from quire.kernels.numba.code.page import (
    score_one_head,
    score_two_heads,
    sum_one_head,
    sum_two_heads,
)
from quire.kernels.numba.code.simd import (
    highest,
    larger,
    load,
    minus_magnitude,
    splat,
    store,
    total,
    where_negative,
)
from quire.kernels.numba.sizes import LANES, SPLIT


def attend(arguments):
    a = arguments[0]
    numbers, sums = a.heads * a.k_width, a.heads * a.v_width
    scratch = shift(a.scratch, claim(arguments, 1) * a.heads * (a.k_width + SPLIT))
    q, weights = scratch, shift(scratch, numbers)
    while True:
        split = claim(arguments, 0)
        if split >= a.splits[0]:
            return
        fields = shift(a.splits, 1 + 6 * split)
        row, begin, end = int64(fields[0]), int64(fields[2]), int64(fields[3])
        table = shift(a.tables, int64(fields[1]) * a.table_width)
        first, count = int64(fields[4]), int64(fields[5])
        result = shift(a.results, split * a.heads * (a.v_width + 2))
        source = shift(a.q, row * numbers)
        for i in range(0, numbers, LANES):
            store(q, i, load(source, i) * a.scale)
        for i in range(0, sums, LANES):
            store(result, i, splat(float32(0.0)))
        _score(a, table, begin, end, q, weights)
        for head in range(a.heads):
            scores = shift(weights, head * SPLIT)
            if a.has_softcap:
                cap(scores, end - begin, a.softcap)
            _weigh(scores, end - begin, shift(result, sums + 2 * head))
        _sum(a, table, begin, end, weights, result)
        if claim(a.finished, first) == count - 1:
            a.finished[first] = 0
            results = shift(a.results, first * a.heads * (a.v_width + 2))
            _join(a, results, count, shift(a.out, row * sums))


@helper
def _score(a, table, begin, end, q, weights):
    group = a.heads // a.kv_heads
    at = begin
    while at < end:
        offset = at % a.block_size
        count = min(a.block_size - offset, end - at)
        page, next_page = _pages(a, a.k, table, at // a.block_size, at + count < end)
        for kv_head in range(a.kv_heads):
            head_page = kv_head * a.block_size * a.k_width
            k = shift(page, head_page + offset * a.k_width)
            next_k = shift(next_page, head_page)
            for head in range(kv_head * group, (kv_head + 1) * group, 2):
                heads_q = shift(q, head * a.k_width)
                scores = shift(weights, head * SPLIT + at - begin)
                if head + 1 < (kv_head + 1) * group:
                    score_two_heads(heads_q, k, next_k, count, a.k_width, scores)
                else:
                    score_one_head(heads_q, k, next_k, count, a.k_width, scores)
        at += count


@helper
def _pages(a, pages, table, block, has_next):
    """A block's page and the one to fetch meanwhile: the next one's, if there is one."""
    page = shift(pages, int64(table[block]) * a.block_stride)
    if has_next:
        return page, shift(pages, int64(table[block + 1]) * a.block_stride)
    return page, page


@helper
def cap(scores, count, softcap):
    """`softcap * tanh(score / softcap)`, in place."""
    one = splat(float32(1.0))
    for i in range(0, count, LANES):
        x = load(scores, i)
        power = exp(minus_magnitude(x) * (float32(2.0) / softcap))
        magnitude = (one - power) / (one + power) * softcap
        store(scores, i, where_negative(x, splat(float32(0.0)) - magnitude, magnitude))


@helper
def _weigh(scores, count, highest_and_total):
    """Turn scores into weights in place."""
    whole = (count + LANES - 1) // LANES * LANES
    for i in range(count, whole):
        scores[i] = float32(-math.inf)
    tops = load(scores, 0)
    for i in range(LANES, whole, LANES):
        tops = larger(tops, load(scores, i))
    top = highest(tops)
    totals = splat(float32(0.0))
    for i in range(0, whole, LANES):
        weights = exp(load(scores, i) - top)
        store(scores, i, weights)
        totals = totals + weights
    highest_and_total[0] = top
    highest_and_total[1] = total(totals)


@helper
def _sum(a, table, begin, end, weights, sums):
    group = a.heads // a.kv_heads
    at = begin
    while at < end:
        offset = at % a.block_size
        count = min(a.block_size - offset, end - at)
        page, next_page = _pages(a, a.v, table, at // a.block_size, at + count < end)
        for kv_head in range(a.kv_heads):
            head_page = kv_head * a.block_size * a.v_width
            v = shift(page, head_page + offset * a.v_width)
            next_v = shift(next_page, head_page)
            for head in range(kv_head * group, (kv_head + 1) * group, 2):
                heads_weights = shift(weights, head * SPLIT + at - begin)
                heads_sums = shift(sums, head * a.v_width)
                if head + 1 < (kv_head + 1) * group:
                    sum_two_heads(heads_weights, v, next_v, count, a.v_width, heads_sums)
                else:
                    sum_one_head(heads_weights, v, next_v, count, a.v_width, heads_sums)
        at += count


@helper
def _join(a, results, count, out):
    numbers = a.heads * a.v_width
    stride = numbers + 2 * a.heads
    for head in range(a.heads):
        tops = shift(results, numbers + 2 * head)
        top = tops[0]
        for split in range(1, count):
            top = max(top, tops[split * stride])
        whole = float32(0.0)
        if a.has_sinks:
            top = max(top, a.sinks[head])
            whole = float32(math.exp(a.sinks[head] - top))
        for split in range(count):
            factor = float32(math.exp(tops[split * stride] - top))
            whole += factor * tops[split * stride + 1]
            tops[split * stride] = factor
        for i in range(0, a.v_width, LANES):
            place = head * a.v_width + i
            sums = splat(float32(0.0))
            for split in range(count):
                sums = sums + load(results, split * stride + place) * tops[split * stride]
            store(out, place, sums / whole)
