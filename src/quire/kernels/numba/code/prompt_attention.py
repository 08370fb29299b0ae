"""Attention of a prompt's rows to the tokens that they see.

K and V are read in their pages once and put in the order in which products take them: of K, sixteen
tokens interleaved; of V, sixteen columns of each token side by side. Then a thread takes some rows
of one head, eight at a time, and goes over the tokens chunk by chunk:

    scores = q · K                             one product with each sixteen tokens
    weights = exp(scores - highest so far)     0 where a row sees nothing
    sums = faded sums + weights · V            one product with each sixteen columns

Chunks begin where tokens are multiples of `CHUNK`, so a row's numbers are summed in one order,
whichever rows are computed beside it.
"""

from __future__ import annotations

import math

from numpy import float32, int64

from quire.kernels.numba.code.attention import cap
from quire.kernels.numba.code.exp import exp
from quire.kernels.numba.code.float_tile import multiply_tile
from quire.kernels.numba.code.memory import claim, count_of, helper, shift
from quire.kernels.numba.code.simd import highest, larger, load, splat, store, total
from quire.kernels.numba.sizes import LANES, PROMPT_CHUNK, PROMPT_ITEM, PROMPT_ROWS

PRODUCTS = 2 * PROMPT_ROWS * LANES


def attend(arguments):
    a = arguments[0]
    _put_in_order(arguments)
    room = PROMPT_ROWS * (a.k_width + a.v_width + PROMPT_CHUNK + 2) + PRODUCTS
    scratch = shift(a.scratch, claim(arguments, 3) * room)
    items = (a.query_len + PROMPT_ITEM - 1) // PROMPT_ITEM
    while True:
        item = claim(arguments, 2)
        if item >= items * a.heads:
            return
        # Those that see most come first: no thread is left alone with one of them.
        last = a.query_len - item // a.heads * PROMPT_ITEM
        first = max(last - PROMPT_ITEM, 0)
        for row in range(first, last, PROMPT_ROWS):
            _attend_rows(a, item % a.heads, row, min(PROMPT_ROWS, last - row), scratch)


@helper
def _put_in_order(arguments):
    """All groups of sixteen tokens; returns when those of other threads are done, too."""
    a = arguments[0]
    group = claim(arguments, 0)
    while group < a.groups:
        for i in range(LANES):
            token = a.start + group * LANES + i
            if a.oldest <= token < a.context:
                _put_token(a, group, i, token)
            else:
                _put_zeros(a, group, i)
        claim(arguments, 1)
        group = claim(arguments, 0)
    while count_of(arguments, 1) < a.groups:
        pass


@helper
def _put_token(a, group, i, token):
    block = int64(a.table[token // a.block_size]) * a.block_stride
    offset = token % a.block_size
    for head in range(a.kv_heads):
        line = head * a.block_size + offset
        k = shift(a.k, block + line * a.k_width)
        v = shift(a.v, block + line * a.v_width)
        keys = shift(a.keys, (head * a.groups + group) * a.k_width * LANES + i)
        for j in range(a.k_width):
            keys[j * LANES] = k[j]
        values = _values(a, head, group * LANES + i)
        for j in range(0, a.v_width, LANES):
            store(values, j * a.groups * LANES, load(v, j))


@helper
def _put_zeros(a, group, i):
    """Tokens that nobody sees have zeros: their weights are 0, but memory may have NaN."""
    for head in range(a.kv_heads):
        keys = shift(a.keys, (head * a.groups + group) * a.k_width * LANES + i)
        for j in range(a.k_width):
            keys[j * LANES] = float32(0.0)
        values = _values(a, head, group * LANES + i)
        for j in range(0, a.v_width, LANES):
            store(values, j * a.groups * LANES, splat(float32(0.0)))


@helper
def _values(a, head, token):
    """Where the first sixteen columns of a token's V are; the next are `16 * groups` lines on."""
    return shift(a.values, (head * (a.v_width // LANES) * a.groups * LANES + token) * LANES)


@helper
def _attend_rows(a, head, row, rows, scratch):
    kv_head = head // (a.heads // a.kv_heads)
    q = scratch
    sums = shift(q, PROMPT_ROWS * a.k_width)
    scores = shift(sums, PROMPT_ROWS * a.v_width)
    products = shift(scores, PROMPT_ROWS * PROMPT_CHUNK)
    tops = shift(products, PRODUCTS)
    totals = shift(tops, PROMPT_ROWS)
    for i in range(PROMPT_ROWS):
        source = shift(a.q, ((row + min(i, rows - 1)) * a.heads + head) * a.k_width)
        for j in range(0, a.k_width, LANES):
            store(q, i * a.k_width + j, load(source, j) * a.scale)
        tops[i], totals[i] = float32(-math.inf), float32(0.0)
    for j in range(0, PROMPT_ROWS * a.v_width, LANES):
        store(sums, j, splat(float32(0.0)))

    first = a.context - a.query_len + row  # what the first row sees last
    begin = max(first - a.window + 1, a.oldest)
    end = first + rows
    chunk = begin // PROMPT_CHUNK * PROMPT_CHUNK
    while chunk < end:
        # Two groups of sixteen tokens at a time.
        count = (min(end - chunk, PROMPT_CHUNK) + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
        _score(a, kv_head, chunk, count, q, products, scores)
        for i in range(PROMPT_ROWS):
            seen = min(first + i, end - 1)
            row_scores = shift(scores, i * count)
            if a.has_softcap:
                cap(row_scores, count, a.softcap)
            _hide(row_scores, count, seen - a.window + 1 - chunk, seen + 1 - chunk)
            top, whole, row_sums = shift(tops, i), shift(totals, i), shift(sums, i * a.v_width)
            _weigh(row_scores, count, top, whole, row_sums, a.v_width)
        _sum(a, kv_head, chunk, count, scores, products, sums)
        chunk += PROMPT_CHUNK

    for i in range(rows):
        whole = totals[i]
        if a.has_sinks:
            whole += float32(math.exp(a.sinks[head] - tops[i]))
        out = shift(a.out, ((row + i) * a.heads + head) * a.v_width)
        for j in range(0, a.v_width, LANES):
            store(out, j, load(sums, i * a.v_width + j) / whole)


@helper
def _score(a, kv_head, chunk, count, q, products, scores):
    """`scores[rows, count]`."""
    group = (chunk - a.start) // LANES
    size = a.k_width * LANES
    keys = shift(a.keys, (kv_head * a.groups + group) * size)
    for token in range(0, count, 2 * LANES):
        multiply_tile(8, keys, shift(keys, size), q, a.k_width, products)
        for i in range(PROMPT_ROWS):
            store(scores, i * count + token, load(products, i * LANES))
            store(scores, i * count + token + LANES, load(products, (PROMPT_ROWS + i) * LANES))
        keys = shift(keys, 2 * size)


@helper
def _hide(scores, count, begin, end):
    """What a row does not see: before `begin` and from `end` on."""
    for i in range(min(begin, count)):
        scores[i] = float32(-math.inf)
    for i in range(max(end, 0), count):
        scores[i] = float32(-math.inf)


@helper
def _weigh(scores, count, top, whole, sums, width):
    """Scores to weights, in place; what was summed fades where there is a higher score now."""
    tops = load(scores, 0)
    for i in range(LANES, count, LANES):
        tops = larger(tops, load(scores, i))
    new_top = max(top[0], highest(tops))
    if new_top == float32(-math.inf):  # the row sees nothing of this chunk, nor of those before
        for i in range(0, count, LANES):
            store(scores, i, splat(float32(0.0)))
        return
    if new_top > top[0]:
        factor = float32(math.exp(top[0] - new_top))
        for i in range(0, width, LANES):
            store(sums, i, load(sums, i) * factor)
        whole[0] *= factor
        top[0] = new_top
    totals = splat(float32(0.0))
    for i in range(0, count, LANES):
        weights = exp(load(scores, i) - new_top)
        store(scores, i, weights)
        totals = totals + weights
    whole[0] += total(totals)


@helper
def _sum(a, kv_head, chunk, count, weights, products, sums):
    size = a.groups * LANES * LANES  # numbers of sixteen columns
    columns = a.v_width // LANES
    values = _values(a, kv_head, chunk - a.start)
    for j in range(0, columns, 2):
        other = min(j + 1, columns - 1)
        first, second = shift(values, j * size), shift(values, other * size)
        multiply_tile(8, first, second, weights, count, products)
        for i in range(PROMPT_ROWS):
            place = i * a.v_width + j * LANES
            store(sums, place, load(sums, place) + load(products, i * LANES))
            if other > j:
                place += LANES
                found = load(products, (PROMPT_ROWS + i) * LANES)
                store(sums, place, load(sums, place) + found)
