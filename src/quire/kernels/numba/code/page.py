"""One page of K or V with one query head or two that share it.

While a page is computed the next one is fetched, for the memory's own foresight ends where a page
does. Loading is what takes longest: two heads, or several tokens, share what is loaded.
"""

from __future__ import annotations

from numpy import float32

from quire.kernels.numba.code.memory import helper, prefetch, shift
from quire.kernels.numba.code.simd import load, splat, store, total
from quire.kernels.numba.sizes import LANES, SPLIT


@helper
def score_two_heads(q, k, next_k, count, head_dim, scores):
    """Two tokens at a time; where there is no second one, the first takes both places."""
    other_q, other_scores = shift(q, head_dim), shift(scores, SPLIT)
    for t in range(0, count, 2):
        u = min(t + 1, count - 1)
        a = b = c = d = splat(float32(0.0))
        for i in range(0, head_dim, LANES):
            one, other = load(q, i), load(other_q, i)
            key, next_key = load(k, t * head_dim + i), load(k, u * head_dim + i)
            prefetch(next_k, t * head_dim + i)
            prefetch(next_k, u * head_dim + i)
            a = a + one * key
            b = b + one * next_key
            c = c + other * key
            d = d + other * next_key
        scores[t] = total(a)
        scores[u] = total(b)
        other_scores[t] = total(c)
        other_scores[u] = total(d)


@helper
def score_one_head(q, k, next_k, count, head_dim, scores):
    """Four tokens at a time; beyond the last one, the last takes the other places too."""
    for t in range(0, count, 4):
        u, v, w = min(t + 1, count - 1), min(t + 2, count - 1), min(t + 3, count - 1)
        a = b = c = d = splat(float32(0.0))
        for i in range(0, head_dim, LANES):
            one = load(q, i)
            prefetch(next_k, t * head_dim + i)
            prefetch(next_k, u * head_dim + i)
            prefetch(next_k, v * head_dim + i)
            prefetch(next_k, w * head_dim + i)
            a = a + one * load(k, t * head_dim + i)
            b = b + one * load(k, u * head_dim + i)
            c = c + one * load(k, v * head_dim + i)
            d = d + one * load(k, w * head_dim + i)
        scores[t] = total(a)
        scores[u] = total(b)
        scores[v] = total(c)
        scores[w] = total(d)


@helper
def sum_two_heads(weights, v, next_v, count, head_dim, sums):
    other_weights, other_sums = shift(weights, SPLIT), shift(sums, head_dim)
    for i in range(0, head_dim, LANES):
        a, b = load(sums, i), load(other_sums, i)
        for t in range(count):
            value = load(v, t * head_dim + i)
            prefetch(next_v, t * head_dim + i)
            a = a + value * weights[t]
            b = b + value * other_weights[t]
        store(sums, i, a)
        store(other_sums, i, b)


@helper
def sum_one_head(weights, v, next_v, count, head_dim, sums):
    """Even and odd tokens apart: two sums that need not wait for each other."""
    for i in range(0, head_dim, LANES):
        a, b = load(sums, i), splat(float32(0.0))
        for t in range(0, count - 1, 2):
            prefetch(next_v, t * head_dim + i)
            prefetch(next_v, (t + 1) * head_dim + i)
            a = a + load(v, t * head_dim + i) * weights[t]
            b = b + load(v, (t + 1) * head_dim + i) * weights[t + 1]
        if count % 2:
            a = a + load(v, (count - 1) * head_dim + i) * weights[count - 1]
        store(sums, i, a + b)
