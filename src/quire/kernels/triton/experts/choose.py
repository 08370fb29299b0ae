"""Which experts a token goes to, found by each program of the kernels that multiply by them.

What `route.py` writes in a launch of its own, for a few tokens of a router whose weights are the
softmax over the chosen ones: its products are as many as a warp has threads, or a few times that,
and the largest of a warp's whole numbers is one instruction. So a product and its expert become a
whole number, which keeps the order of `route.py`: of equals the first expert is ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.experts import NOWHERE, RouterProducts

_LANES = tl.constexpr(32)  # of a warp: tensors of so many are whole in each
_MOST = 128  # experts
_NONE = tl.constexpr(-(2**31))  # less than any key
_LOW = tl.constexpr(0xFFFF)  # bits of a key, which are the expert, counted down from …
_FIRST = tl.constexpr(0xFFFE)  # … so that no key is as large as a whole number may be
_ALL = tl.constexpr(2**31 - 1)
_NOWHERE = tl.constexpr(NOWHERE)


def can_choose(products: RouterProducts) -> bool:
    """Whether they are numbers of 16 bits that fill the threads of a warp."""
    numbers = products.numbers
    lanes, count = _LANES.value, numbers.shape[1]
    is_even = count <= _MOST and count % lanes == 0 and numbers.is_contiguous()
    return is_even and numbers.dtype in (torch.float16, torch.bfloat16)


@triton.jit
def chosen_expert(products, is_padding, token, place, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert in this place of a token's choice, both single numbers."""
    padded = tl.load(is_padding + token) != 0
    keys = _keys(_load(products + token * EXPERTS, EXPERTS))
    best = _below(keys, _ALL)
    for i in tl.static_range(1, TOP_K):
        best = tl.where(place < i, best, _below(keys, best))
    return tl.where(padded, _NOWHERE, _expert(best)).to(tl.int64)


@triton.jit
def chosen_experts(products, is_padding, token, place, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """The experts in these places of a token's choice, and what each counts: nothing, where there
    is none."""
    padded = tl.load(is_padding + token) != 0
    numbers = _load(products + token * EXPERTS, EXPERTS)
    keys = _keys(numbers)
    best = _below(keys, _ALL)
    top = _number(best, numbers[0].dtype)
    expert = tl.where(place == 0, _expert(best), _NOWHERE)
    score = tl.where(place == 0, top, -float("inf"))
    for i in tl.static_range(1, TOP_K):
        best = _below(keys, best)
        expert = tl.where(place == i, _expert(best), expert)
        score = tl.where(place == i, _number(best, numbers[0].dtype), score)
    total = tl.zeros((_LANES,), tl.float32)
    for i in tl.static_range(EXPERTS // _LANES):
        total += tl.where(keys[i] >= best, tl.exp(numbers[i].to(tl.float32) - top), 0.0)
    share = (tl.exp(score - top) / tl.sum(total, 0)).to(numbers[0].dtype).to(tl.float32)
    expert = tl.where(padded, _NOWHERE, expert).to(tl.int64)
    return expert, tl.where(expert >= 0, share, 0.0)


@triton.jit
def _load(row, EXPERTS: tl.constexpr):
    """Of each thread those of experts that are so many threads apart."""
    numbers = ()
    for i in tl.static_range(EXPERTS // _LANES):
        numbers = appended(numbers, tl.load(row + i * _LANES + tl.arange(0, _LANES)))
    return numbers


@triton.jit
def _keys(numbers):
    """Whole numbers in the order of these, of which no two are the same."""
    keys = ()
    for i in tl.static_range(len(numbers)):
        bits = numbers[i].to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits < 0, bits ^ 0x7FFF, bits)
        keys = appended(keys, (bits << 16) | (_FIRST - i * _LANES - tl.arange(0, _LANES)))
    return keys


@triton.jit
def appended(things, one):
    return things + (one,)  # noqa: RUF005 (Triton has no other way)


@triton.jit
def _below(keys, limit):
    """The largest key that is less than the limit."""
    found = tl.full((_LANES,), _NONE, tl.int32)
    for i in tl.static_range(len(keys)):
        found = tl.maximum(found, tl.where(keys[i] < limit, keys[i], _NONE))
    return tl.max(found, 0)


@triton.jit
def _expert(key):
    return _FIRST - (key & _LOW)


@triton.jit
def _number(key, dtype: tl.constexpr):
    """The product that became this key."""
    bits = key >> 16
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
