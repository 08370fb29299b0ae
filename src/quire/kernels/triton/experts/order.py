"""Pairs of a token and an expert, sorted by expert on the device, in one launch.

A product multiplies blocks of pairs that have the same expert. How many there are only the device
knows. Of the experts before `e` there are `begin` pairs, so its blocks are numbered from

    begin // size + e

which leaves each expert room enough, and is known without asking how many blocks the others have.
Numbers that are left over stand for no block: `pairs // size + experts` are all there can be. So a
grid has a size that the host knows, nothing waits, and a graph holds it all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait

_CHUNK = 4096  # pairs that a program looks at together
_LANES = 128  # blocks that it writes together


class Blocks(NamedTuple):
    """Which pairs each program of a product has."""

    order: Tensor  # int32 [pairs]: the pairs, numbered token by token, sorted by expert
    table: Tensor  # int32 [3, blocks]: the expert, or -1; where in `order` it begins and ends
    size: int  # pairs of a block, at most

    @property
    def number(self) -> int:
        return self.table.shape[1]


def sort_by_expert(experts: Tensor, count: int, size: int) -> Blocks:
    """`experts` `[tokens, top_k]`; numbers that are no expert's are in no block."""
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    most = pairs // size + count
    table = torch.empty((3, most), dtype=torch.int32, device=experts.device)
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(pairs)))
    _sort[(count,)](
        experts.contiguous(),
        order,
        table,
        pairs,
        count,
        most,
        SIZE=size,
        CHUNK=chunk,
        LANES=_LANES,
        num_warps=min(8, max(1, chunk // 256)),
        **pdl_launch(experts.device),
    )
    return Blocks(order, table, size)


@triton.jit(do_not_specialize=["pairs", "count", "most"])
def _sort(
    experts,
    order,
    table,
    pairs,
    count,
    most,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program finds all that one expert has."""
    mine = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    trigger_then_wait(PDL)
    before = tl.zeros((CHUNK,), tl.int32)
    held = before
    for start in range(0, pairs, CHUNK):
        chosen = tl.load(experts + start + lane, mask=start + lane < pairs, other=-1)
        before += ((chosen >= 0) & (chosen < mine)).to(tl.int32)
        held += (chosen == mine).to(tl.int32)
    begin = tl.sum(before, 0)
    end = begin + tl.sum(held, 0)

    first = begin // SIZE + mine
    last = tl.where(mine == count - 1, most, end // SIZE + mine + 1)
    for start in range(first, last, LANES):
        block = start + tl.arange(0, LANES)
        at = begin + (block - first) * SIZE
        mask = block < last
        tl.store(table + block, tl.where(at < end, mine, -1), mask=mask)
        tl.store(table + most + block, at, mask=mask)
        tl.store(table + 2 * most + block, tl.minimum(at + SIZE, end), mask=mask)

    at = begin
    for start in range(0, pairs, CHUNK):
        pair = start + lane
        chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
        is_mine = (chosen == mine).to(tl.int32)
        tl.store(order + at + tl.cumsum(is_mine, 0) - 1, pair, mask=is_mine != 0)
        at += tl.sum(is_mine, 0)
