"""Products of few tokens each with the matrices of several experts, in one call.

An item of work is some rows of one expert's matrix with all tokens of that expert, tile by tile
(`dot_tile.py`). A sum goes over a row in one order, whatever other tokens there are.
"""

from __future__ import annotations

from quire.kernels.numba.code.dot_tile import MOST, dot_tile
from quire.kernels.numba.code.memory import claim, helper, shift
from quire.kernels.numba.sizes import GROUPED_TILE

ROWS = 32  # of a matrix, claimed at a time

most_by_most, most_by_two, most_by_one = (dot_tile(MOST, count) for count in (MOST, 2, 1))
few_by_most, few_by_two, few_by_one = (dot_tile(GROUPED_TILE, count) for count in (MOST, 2, 1))


def multiply(arguments):
    a = arguments[0]
    parts = (a.rows + ROWS - 1) // ROWS
    while True:
        item = claim(arguments, 0)
        if item >= a.num_groups * parts:
            return
        group, first = 3 * (item // parts), ROWS * (item % parts)
        expert, token, tokens = a.groups[group], a.groups[group + 1], a.groups[group + 2]
        weights = shift(a.weights, expert * a.rows * a.size)
        row, end = first, min(first + ROWS, a.rows)
        while row < end:
            w = shift(weights, row * a.size)
            if row + MOST <= end:
                _most_rows(w, a, row, token, token + tokens)
                row += MOST
            else:
                _few_rows(w, a, row, token, token + tokens)
                row += GROUPED_TILE


@helper
def _most_rows(w, a, row, token, end):
    while token < end:
        x, out = shift(a.x, token * a.size), shift(a.out, token * a.rows + row)
        if token + MOST <= end:
            most_by_most(w, x, out, a.size, a.rows)
            token += MOST
        elif token + 2 <= end:
            most_by_two(w, x, out, a.size, a.rows)
            token += 2
        else:
            most_by_one(w, x, out, a.size, a.rows)
            token += 1


@helper
def _few_rows(w, a, row, token, end):
    while token < end:
        x, out = shift(a.x, token * a.size), shift(a.out, token * a.rows + row)
        if token + MOST <= end:
            few_by_most(w, x, out, a.size, a.rows)
            token += MOST
        elif token + 2 <= end:
            few_by_two(w, x, out, a.size, a.rows)
            token += 2
        else:
            few_by_one(w, x, out, a.size, a.rows)
            token += 1
