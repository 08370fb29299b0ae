"""Products of few tokens each with the matrices of several experts, in one call.

An item of work is some rows of one expert's matrix with all tokens of that expert, tile by tile
(`dot_tile.py`). A sum goes over a row in one order, whatever other tokens there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.numba.dot_tile import MOST, dot_tile
from quire.kernels.numba.kernel import Count, Elements, Int64s, Kernel, Version
from quire.kernels.numba.memory import claim, helper, shift

ROWS = 32  # of a matrix, claimed at a time
TILE = 2  # rows of the smallest tile


class GroupedArguments(NamedTuple):
    next: Count
    groups: Int64s  # [groups, 3]: an expert, its first token, how many it has
    num_groups: Count
    rows: Count  # of each matrix
    size: Count
    weights: Elements  # [experts, rows, size]
    x: Elements  # [tokens, size]
    out: Elements  # [tokens, rows]
    version: Version


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
                _all_tokens(w, a, row, token, token + tokens)
                row += MOST
            else:
                _all_tokens_of_two(w, a, row, token, token + tokens)
                row += 2


most_by_most, most_by_two, most_by_one = (dot_tile(MOST, count) for count in (MOST, 2, 1))
two_by_most, two_by_two, two_by_one = (dot_tile(TILE, count) for count in (MOST, 2, 1))


@helper
def _all_tokens(w, a, row, token, end):
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
def _all_tokens_of_two(w, a, row, token, end):
    while token < end:
        x, out = shift(a.x, token * a.size), shift(a.out, token * a.rows + row)
        if token + MOST <= end:
            two_by_most(w, x, out, a.size, a.rows)
            token += MOST
        elif token + 2 <= end:
            two_by_two(w, x, out, a.size, a.rows)
            token += 2
        else:
            two_by_one(w, x, out, a.size, a.rows)
            token += 1


grouped_kernel = Kernel(multiply, GroupedArguments)


def grouped_linear(weights: Tensor, x: Tensor, sizes: list[int], threads: int) -> Tensor:
    """`x` `[tokens, size]`, of which the first tokens are the first expert's, and so on, times
    `weights` `[experts, rows, size]`; an even number of rows."""
    counts = np.array(sizes, dtype=np.int64)
    used = counts.nonzero()[0]
    groups = np.stack((used, (counts.cumsum() - counts)[used], counts[used]), axis=1)
    rows, size = weights.shape[1:]
    out = torch.empty((len(x), rows), dtype=x.dtype)
    grouped_kernel(
        x.dtype,
        threads,
        0,
        groups.ctypes.data,
        len(groups),
        rows,
        size,
        weights.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
    )
    return out
