"""Pairs of a token and an expert, sorted by expert on the device, in a launch or two.

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
from quire.kernels.triton.sizes import cdiv, next_power_of_2

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

    @property
    def rows(self) -> int:
        """Of a tensor that has `size` rows for each block (`by_block` in `gather.py`)."""
        return self.number * self.size


def sort_by_expert(experts: Tensor, count: int, size: int) -> Blocks:
    """`experts` `[tokens, top_k]`; numbers that are no expert's are in no block."""
    pairs, device = experts.numel(), experts.device
    experts = experts.contiguous()
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    most = pairs // size + count
    table = torch.empty((3, most), dtype=torch.int32, device=device)
    chunk = min(_CHUNK, max(32, next_power_of_2(pairs)))
    chunks = cdiv(pairs, chunk)
    warps = min(8, max(1, chunk // 256))
    counts = table
    if chunks > 1:
        counts = torch.empty((chunks, count), dtype=torch.int32, device=device)
        _count[(count, chunks)](
            experts, counts, pairs, CHUNK=chunk, num_warps=warps, **pdl_launch(device)
        )
    _sort[(count, chunks)](
        experts,
        counts,
        order,
        table,
        pairs,
        most,
        SIZE=size,
        CHUNK=chunk,
        CHUNKS=next_power_of_2(chunks),
        EXPERTS=next_power_of_2(count),
        LANES=_LANES,
        num_warps=warps,
        **pdl_launch(device),
    )
    return Blocks(order, table, size)


@triton.jit(do_not_specialize=["pairs"])
def _count(experts, counts, pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """How many pairs of a chunk an expert has."""
    mine, chunk = tl.program_id(0), tl.program_id(1)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    trigger_then_wait(PDL)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
    found = tl.sum((chosen == mine).to(tl.int32), 0)
    tl.store(counts + chunk * tl.num_programs(0) + mine, found)


@triton.jit(do_not_specialize=["pairs", "most"])
def _sort(
    experts,
    counts,
    order,
    table,
    pairs,
    most,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program finds what one expert has of a chunk; the first chunk's writes its blocks, too."""
    mine, chunk = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    trigger_then_wait(PDL)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
    is_mine = (chosen == mine).to(tl.int32)
    if CHUNKS == 1:
        begin = tl.sum(((chosen >= 0) & (chosen < mine)).to(tl.int32), 0)
        end = begin + tl.sum(is_mine, 0)
        at = begin
    else:
        expert, other = tl.arange(0, EXPERTS)[None, :], tl.arange(0, CHUNKS)[:, None]
        there_are = (expert < count) & (other < tl.num_programs(1))
        found = tl.load(counts + other * count + expert, mask=there_are, other=0)
        begin = tl.sum(tl.sum(tl.where(expert < mine, found, 0), 1), 0)
        of_mine = tl.sum(tl.where(expert == mine, found, 0), 1)
        end = begin + tl.sum(of_mine, 0)
        at = begin + tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, of_mine, 0), 0)
    tl.store(order + at + tl.cumsum(is_mine, 0) - 1, pair, mask=is_mine != 0)

    first = begin // SIZE + mine
    last = tl.where(mine == count - 1, most, end // SIZE + mine + 1)
    last = tl.where(chunk == 0, last, first)
    for start in range(first, last, LANES):
        block = start + tl.arange(0, LANES)
        place = begin + (block - first) * SIZE
        mask = block < last
        tl.store(table + block, tl.where(place < end, mine, -1), mask=mask)
        tl.store(table + most + block, place, mask=mask)
        tl.store(table + 2 * most + block, tl.minimum(place + SIZE, end), mask=mask)
