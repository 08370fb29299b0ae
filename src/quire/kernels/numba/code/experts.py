"""What happens around the products of experts: the choice, the order, and the sum.

route     each token's scores ─► its experts, and what each counts
sort      pairs of a token and an expert, in the order of experts; the tokens' rows with them
combine   each token's results, weighted and added up
"""

from __future__ import annotations

import math

from numpy import float32, int64

from quire.kernels.numba.code.exp import exp
from quire.kernels.numba.code.memory import claim, helper, shift
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
from quire.kernels.numba.sizes import LANES

NOWHERE = -1
TINY = float32(1e-20)  # what keeps a sum of scores that are all 0 from being divided by
LOWEST = float32(-math.inf)


def route(arguments):
    a = arguments[0]
    while True:
        token = claim(arguments, 0)
        if token >= a.tokens:
            return
        chosen, weights = shift(a.chosen, token * a.top_k), shift(a.weights, token * a.top_k)
        if a.slots[token] < 0:
            for k in range(a.top_k):
                chosen[k] = NOWHERE
                weights[k] = float32(0.0)
            continue
        scores = shift(a.scores, 2 * token * a.room)
        _score(a, shift(a.x, token * a.size), scores)
        if a.is_softmax:
            _softmax(scores, a.room)
        elif a.is_sigmoid:
            _sigmoid(scores, a.room)
        ranked = shift(scores, a.room)
        for i in range(a.experts):
            ranked[i] = scores[i]
            if a.has_correction:
                ranked[i] += a.correction[i]
        _choose(a, ranked, scores, chosen, weights)
        _weigh(a, weights)


@helper
def _score(a, x, scores):
    """The router's products; behind the last one, what is less than any score."""
    for expert in range(a.experts):
        weight = shift(a.weight, expert * a.size)
        products = splat(float32(0.0))
        for i in range(0, a.size, LANES):
            products = products + load(x, i) * load(weight, i)
        scores[expert] = total(products)
        if a.has_bias:
            scores[expert] += a.bias[expert]
    for i in range(a.experts, a.room):
        scores[i] = LOWEST


@helper
def _softmax(scores, room):
    tops = load(scores, 0)
    for i in range(LANES, room, LANES):
        tops = larger(tops, load(scores, i))
    top = highest(tops)
    totals = splat(float32(0.0))
    for i in range(0, room, LANES):
        powers = exp(load(scores, i) - top)
        store(scores, i, powers)
        totals = totals + powers
    whole = total(totals)
    for i in range(0, room, LANES):
        store(scores, i, load(scores, i) / whole)


@helper
def _sigmoid(scores, room):
    one = splat(float32(1.0))
    for i in range(0, room, LANES):
        x = load(scores, i)
        power = exp(minus_magnitude(x))  # at most 1: nothing overflows
        store(scores, i, where_negative(x, power, one) / (one + power))


@helper
def _choose(a, ranked, scores, chosen, weights):
    """The best first; of two alike the first."""
    for k in range(a.top_k):
        best = int64(0)
        for i in range(1, a.experts):
            if ranked[i] > ranked[best]:
                best = int64(i)
        chosen[k] = best
        weights[k] = scores[best]
        ranked[best] = LOWEST


@helper
def _weigh(a, weights):
    if not (a.is_softmax or a.is_sigmoid):  # the softmax over the chosen ones, the best first
        top = weights[0]
        whole = float32(0.0)
        for k in range(a.top_k):
            weights[k] = float32(math.exp(weights[k] - top))
            whole += weights[k]
        for k in range(a.top_k):
            weights[k] /= whole
    if a.is_renormalised:
        whole = TINY
        for k in range(a.top_k):
            whole += weights[k]
        for k in range(a.top_k):
            weights[k] /= whole
    for k in range(a.top_k):
        weights[k] *= a.scale


def sort(arguments):
    """One thread counts, and puts each pair behind those of its expert before it."""
    a = arguments[0]
    if claim(arguments, 0):
        return
    for expert in range(a.experts):
        a.starts[expert] = 0
    for pair in range(a.pairs):
        expert = a.chosen[pair]
        if 0 <= expert < a.experts:
            a.starts[expert] += 1
    runs, at = int64(0), int64(0)
    for expert in range(a.experts):
        count = a.starts[expert]
        a.starts[expert] = at
        if count:
            run = shift(a.runs, 1 + 3 * runs)
            run[0], run[1], run[2] = expert, at, at + count
            runs += 1
            at += count
    a.runs[0] = runs
    for pair in range(a.pairs):
        expert = a.chosen[pair]
        if 0 <= expert < a.experts:
            place = a.starts[expert]
            a.starts[expert] = place + 1
            a.places[pair] = place
            x, row = shift(a.x, pair // a.top_k * a.size), shift(a.rows, place * a.size)
            for i in range(0, a.size, LANES):
                store(row, i, load(x, i))
        else:
            a.places[pair] = NOWHERE


def combine(arguments):
    a = arguments[0]
    while True:
        token = claim(arguments, 0)
        if token >= a.tokens:
            return
        weights, places = shift(a.weights, token * a.top_k), shift(a.places, token * a.top_k)
        out = shift(a.out, token * a.size)
        for i in range(0, a.size, LANES):
            sums = splat(float32(0.0))
            for k in range(a.top_k):
                if places[k] >= 0:
                    sums = sums + load(a.found, places[k] * a.size + i) * weights[k]
            store(out, i, sums)
