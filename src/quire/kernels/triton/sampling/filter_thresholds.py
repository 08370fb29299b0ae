"""min-p, top-k and top-p without a sort: the smallest weight that is kept, found by search.

Weights lie between 0 and 1, where floats are ordered as the integers that have their bits. What
top-k and top-p ask for is the largest threshold such that the weights above it are enough: k of
them, or p of the total. A pass over the row tries seven thresholds at once and leaves an eighth of
the interval, so ten passes find one. What they keep, and what becomes of ties, is what
`runner/sampling/filters.py` says.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import next_power_of_2

WIDTH = 4096  # logits that a program reads at a time
_TRIES: tl.constexpr = tl.constexpr(8)
_ABOVE_ONE: tl.constexpr = tl.constexpr(0x3F800001)  # the bits of the float after 1


def find_thresholds(logits: Tensor, settings: Tensor, tops: Tensor, thresholds: Tensor) -> None:
    """Set `thresholds`, as bits, of rows that filter; one program a row. See `sample.draw`."""
    rows, vocab_size = logits.shape
    stretches = tops.shape[1]
    _find_thresholds[(rows,)](
        logits,
        settings,
        tops,
        thresholds,
        rows,
        logits.stride(0),
        VOCAB=vocab_size,
        STRETCHES=stretches,
        STRETCHES_WIDTH=next_power_of_2(stretches),
        WIDTH=WIDTH,
        num_warps=16,
    )


@triton.jit
def weigh(x, peak, temperature):
    """exp((x - peak) / temperature); the peak comes off first, so that nothing can overflow."""
    base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    return tl.exp((x - base) / temperature)


@triton.jit(do_not_specialize=["rows"])
def _find_thresholds(
    logits,
    settings,
    tops,
    thresholds,
    rows,
    row_stride,
    VOCAB: tl.constexpr,
    STRETCHES: tl.constexpr,
    STRETCHES_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(settings + row).to(tl.float32)
    min_p = tl.load(settings + rows + row).to(tl.float32)
    top_k = tl.load(settings + 2 * rows + row)
    top_p = tl.load(settings + 3 * rows + row)
    stretch = tl.arange(0, STRETCHES_WIDTH)
    there = stretch < STRETCHES
    top = tl.max(tl.load(tops + row * STRETCHES + stretch, mask=there, other=float("-inf")), 0)
    sound = tl.abs(top) < float("inf")
    if (temperature > 0) & sound:
        line = logits + row * row_stride
        threshold = min_p.to(tl.int32, bitcast=True)
        kth = threshold * 0
        if top_k < VOCAB:
            kth = _search(line, top, temperature, kth, top_k, VOCAB, WIDTH, True)
        if top_p < 1:
            # The total is of what the other filters leave. Of weights that tie at the k-th place
            # it has as many as make k.
            least = tl.maximum(threshold, kth)
            number, mass = _above(line, top, temperature, least + 1, VOCAB, WIDTH)
            if (kth >= threshold) & (top_k < VOCAB):
                mass += (top_k - number) * least.to(tl.float32, bitcast=True)
            else:
                _, mass = _above(line, top, temperature, least, VOCAB, WIDTH)
            nucleus = _search(line, top, temperature, least, top_p * mass, VOCAB, WIDTH, False)
            threshold = tl.maximum(threshold, nucleus)
        tl.store(thresholds + row, tl.maximum(threshold, kth))


@triton.jit
def _search(
    line,
    top,
    temperature,
    low,
    enough,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The largest threshold from `low` on with `enough` weights, or weight, at and above it."""
    high = low * 0 + _ABOVE_ONE
    while high - low > 1:
        step = tl.cdiv(high - low, _TRIES)
        tried = low + step * tl.arange(0, _TRIES)
        amount = tl.zeros([_TRIES, WIDTH], tl.float32)
        for start in range(0, VOCAB, WIDTH):
            weights, bits = _weights(line, start, top, temperature, VOCAB, WIDTH)
            each = tl.full([WIDTH], 1.0, tl.float32) if COUNT else weights
            amount += tl.where(bits[None, :] >= tried[:, None], each[None, :], 0.0)
        reached = tl.sum(amount.to(tl.float64), 1) >= enough
        low = tl.maximum(low, tl.max(tl.where(reached, tried, 0), 0))
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _above(line, top, temperature, threshold, VOCAB: tl.constexpr, WIDTH: tl.constexpr):
    """How many weights are at or above `threshold`, and their sum."""
    number = tl.zeros([WIDTH], tl.float32)
    mass = tl.zeros([WIDTH], tl.float32)
    for start in range(0, VOCAB, WIDTH):
        weights, bits = _weights(line, start, top, temperature, VOCAB, WIDTH)
        number += (bits >= threshold).to(tl.float32)
        mass += tl.where(bits >= threshold, weights, 0.0)
    return tl.sum(number.to(tl.float64), 0), tl.sum(mass.to(tl.float64), 0)


@triton.jit
def _weights(line, start, top, temperature, VOCAB: tl.constexpr, WIDTH: tl.constexpr):
    """A few weights and their bits; beyond the vocabulary the bits are below all thresholds."""
    token = start + tl.arange(0, WIDTH)
    x = tl.load(line + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    weights = weigh(x, top, temperature)
    return weights, tl.where(token < VOCAB, weights.to(tl.int32, bitcast=True), -1)
