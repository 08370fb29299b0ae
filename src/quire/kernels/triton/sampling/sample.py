"""Drawing tokens without a sort: few passes over the logits, none of which the host waits for.

    survey     every stretch of every row: its peak, where that is, and the sum of its weights
    threshold  rows that filter: the smallest weight that is kept (`filter_thresholds.py`)
    resum      the same rows: the sum of what is left of each stretch
    pick       every row: the stretch in which the noise falls, then the token in it

A weight is exp((logit - peak) / temperature). Sums of a survey are relative to the stretch's own
peak, for the row's is not known yet. A row of temperature 0 takes the first token at the peak.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait, wait_then_trigger
from quire.kernels.triton.sampling.filter_thresholds import find_thresholds, weigh
from quire.kernels.triton.sizes import cdiv, next_power_of_2

STRETCH = 4096  # tokens
TEMPERATURE, MIN_P, TOP_K, TOP_P = range(4)
_NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)


def draw(
    logits: Tensor, settings: Tensor, noise: Tensor, filtered: bool, told: Tensor
) -> tuple[Tensor, Tensor]:
    """A token and the peak logit of each row of `logits` `[rows, vocabulary]`.

    `settings` are float64 `[4, rows]`, on the device: temperature, min-p, top-k (the vocabulary's
    size where off) and top-p; `noise` is the number in (0, 1) that decides. `filtered` says whether
    any row filters. The peak is infinite where a logit is, or is no number.

    `told` is float32: all tokens once more, then all peaks. It may be memory of the host, and so
    may `noise`: a copy engine would begin some microseconds after the kernel ahead has ended.
    """
    rows, vocab_size = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return token_ids, peaks
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    stretches = cdiv(vocab_size, STRETCH)
    fours = -(-rows // 4) * 4  # all three begin at 16 bytes then: there are no kernels for others
    tops, sums, places = torch.empty(
        (3, fours, stretches), dtype=torch.float32, device=logits.device
    ).unbind()
    places = places.view(torch.int32)
    thresholds = torch.zeros(rows, dtype=torch.int32, device=logits.device) if filtered else places
    sizes = {"VOCAB": vocab_size, "STRETCH": STRETCH}
    width = next_power_of_2(stretches)
    grid, stride = (rows, stretches), logits.stride(0)
    pdl = pdl_launch(logits.device)
    _survey[grid](logits, settings, tops, places, sums, stride, **sizes, **pdl)
    if filtered:
        find_thresholds(logits, settings, tops, thresholds)
        _resum[grid](logits, settings, tops, thresholds, sums, stride, WIDTH=width, **sizes)
    _pick[(rows,)](
        logits,
        settings,
        noise,
        tops,
        places,
        sums,
        thresholds,
        token_ids,
        peaks,
        told,
        rows,
        stride,
        STRETCHES=stretches,
        WIDTH=width,
        FILTERED=filtered,
        **sizes,
        num_warps=8,
        **pdl,
    )
    return token_ids, peaks


@triton.jit
def _survey(
    logits,
    settings,
    tops,
    places,
    sums,
    row_stride,
    VOCAB: tl.constexpr,
    STRETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_then_trigger(PDL)
    token = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    x = _load(logits + row * row_stride, token, VOCAB)
    top = tl.max(x, 0)
    place = tl.min(tl.where(x == top, token, _NOWHERE), 0)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + out, top)
    tl.store(places + out, place)
    temperature = tl.load(settings + row).to(tl.float32)
    if temperature > 0:
        tl.store(sums + out, tl.sum(weigh(x, top, temperature), 0))


@triton.jit
def _resum(
    logits,
    settings,
    tops,
    thresholds,
    sums,
    row_stride,
    VOCAB: tl.constexpr,
    STRETCH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(thresholds + row)
    if threshold == 0:
        return
    count = tl.num_programs(1)
    stretch = tl.arange(0, WIDTH)
    top = tl.max(
        tl.load(tops + row * count + stretch, mask=stretch < count, other=float("-inf")), 0
    )
    token = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    x = _load(logits + row * row_stride, token, VOCAB)
    weights = weigh(x, top, tl.load(settings + row).to(tl.float32))
    kept = tl.where(weights.to(tl.int32, bitcast=True) >= threshold, weights, 0.0)
    tl.store(sums + row * count + tl.program_id(1), tl.sum(kept, 0))


@triton.jit(do_not_specialize=["rows"])
def _pick(
    logits,
    settings,
    noises,
    tops,
    places,
    sums,
    thresholds,
    token_ids,
    peaks,
    told,
    rows,
    row_stride,
    VOCAB: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
    WIDTH: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.arange(0, WIDTH)
    there = stretch < STRETCHES
    # What no kernel writes, or one before the survey: memory of the host takes a microsecond.
    temperature = tl.load(settings + row).to(tl.float32)
    noise = temperature.to(tl.float64)
    if temperature > 0:
        noise = tl.load(noises + row)
    trigger_then_wait(PDL)
    tops_here = tl.load(tops + row * STRETCHES + stretch, mask=there, other=float("-inf"))
    top = tl.max(tops_here, 0)
    tl.store(peaks + row, top)
    if temperature > 0:
        threshold = tl.load(thresholds + row) if FILTERED else 0
        mass = tl.load(sums + row * STRETCHES + stretch, mask=there, other=0.0)
        if threshold == 0:
            mass *= weigh(tops_here, top, temperature)
        found, rest = _find(mass.to(tl.float64), noise, stretch, WIDTH)
        token = found * STRETCH + tl.arange(0, STRETCH)
        x = _load(logits + row * row_stride, token, VOCAB)
        weights = weigh(x, top, temperature)
        kept = tl.where(weights.to(tl.int32, bitcast=True) >= threshold, weights, 0.0)
        found, rest = _find(kept.to(tl.float64), rest, token, STRETCH)
    else:
        place = tl.load(places + row * STRETCHES + stretch, mask=there, other=_NOWHERE)
        found = tl.min(tl.where(tops_here == top, place, _NOWHERE), 0)
    found = tl.minimum(found, VOCAB - 1)
    tl.store(token_ids + row, found)
    tl.store(told + row, found.to(tl.float32))
    tl.store(told + rows + row, top)


@triton.jit
def _load(row, token, VOCAB: tl.constexpr):
    """Logits in float32; what is no number is infinite, so that it shows in the peak."""
    x = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _find(mass, noise, name, SIZE: tl.constexpr):
    """The name of the item in which `noise` of the total falls, and how far into it, from 0 to 1.

    It has some mass of its own, even where rounding puts the target past the last sum.
    """
    sums = tl.cumsum(mass, 0)
    last = tl.max(tl.where(mass > 0, name, 0), 0)
    target = noise * tl.max(sums, 0)
    found = tl.min(tl.where((sums > target) & (mass > 0), name, last), 0)
    own = tl.sum(tl.where(name == found, mass, 0.0), 0)
    passed = tl.sum(tl.where(name == found, sums, 0.0), 0) - own
    rest = (target - passed) / tl.where(own > 0, own, 1.0)
    return found, tl.minimum(tl.maximum(rest, 0.0), 1.0)
