"""A kernel that writes what `choose.py` finds."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.experts.choose import chosen_expert, chosen_experts


@triton.jit
def write_choice(
    products, is_padding, alone, experts, shares, TOP_K: tl.constexpr, EXPERTS: tl.constexpr
):
    token = tl.program_id(0)
    place = tl.arange(0, TOP_K)
    expert, share = chosen_experts(products, is_padding, token, place, TOP_K, EXPERTS)
    tl.store(experts + token * TOP_K + place, expert)
    tl.store(shares + token * TOP_K + place, share)
    for i in range(TOP_K):
        one = chosen_expert(products, is_padding, token, i, TOP_K, EXPERTS)
        tl.store(alone + token * TOP_K + i, one)
