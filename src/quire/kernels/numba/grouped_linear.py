"""Products of few tokens each with the matrices of several experts, in one call.

An item of work is some rows of one expert's matrix with all tokens of that expert. Two rows and
two tokens are multiplied at a time: all that is loaded is used twice, and on ARM that is as much as
registers hold. A sum goes over a row in one order, whatever other tokens there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy import float32
from torch import Tensor

from quire.kernels.numba.kernel import Count, Elements, Int64s, Kernel, Version
from quire.kernels.numba.memory import claim, helper, shift
from quire.kernels.numba.simd import LANES, load, splat, total

ROWS = 32  # of a matrix, claimed at a time
TILE = 2  # rows and tokens


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
        for row in range(first, min(first + ROWS, a.rows), TILE):
            w = shift(weights, row * a.size)
            for i in range(token, token + tokens, TILE):
                x, out = shift(a.x, i * a.size), shift(a.out, i * a.rows + row)
                if i + 1 < token + tokens:
                    _two_tokens(w, x, out, a.size, a.rows)
                else:
                    _one_token(w, x, out, a.size)


@helper
def _two_tokens(w, x, out, size, rows):
    zero = splat(float32(0.0))
    s0, s1, t0, t1 = zero, zero, zero, zero
    for i in range(0, size, LANES):
        v, u = load(w, i), load(w, size + i)
        x0, x1 = load(x, i), load(x, size + i)
        s0, s1 = s0 + v * x0, s1 + v * x1
        t0, t1 = t0 + u * x0, t1 + u * x1
    out[0], out[1] = total(s0), total(t0)
    out[rows], out[rows + 1] = total(s1), total(t1)


@helper
def _one_token(w, x, out, size):
    s, t = splat(float32(0.0)), splat(float32(0.0))
    for i in range(0, size, LANES):
        x0 = load(x, i)
        s, t = s + load(w, i) * x0, t + load(w, size + i) * x0
    out[0], out[1] = total(s), total(t)


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
