"""Tokens in the order of experts, a copy for each: so the hardware can copy tiles of them.

Their columns are put in the order of steps of products with four-bit codes (`four_bits.py`), each
of 32 columns of each quarter, and filled up with zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.four_bits import GROUP, quarter_of
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait

_ROWS = 4  # of a program
_WIDTH = 1024  # columns that it copies together


def by_expert_and_step(x: Tensor, blocks: Blocks, top_k: int) -> Tensor:
    """`[pairs, 4 * quarter]`: of each pair its token; what is in no block is left as it was."""
    columns = x.shape[1]
    quarter = quarter_of(columns)
    out = torch.empty((len(blocks.order), 4 * quarter), dtype=x.dtype, device=x.device)
    _gather[(blocks.number * (blocks.size // _ROWS), triton.cdiv(4 * quarter, _WIDTH))](
        x,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        columns,
        quarter,
        top_k,
        GROUP=GROUP,
        BLOCK=blocks.size,
        ROWS=_ROWS,
        WIDTH=_WIDTH,
        **pdl_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["most", "top_k"])
def _gather(
    x,
    out,
    order,
    table,
    most,
    columns,
    quarter,
    top_k,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0) // (BLOCK // ROWS)
    first = tl.program_id(0) % (BLOCK // ROWS) * ROWS
    trigger_then_wait(PDL)
    if tl.load(table + block) < 0:
        return
    place = tl.load(table + most + block) + first + tl.arange(0, ROWS)
    is_pair = place < tl.load(table + 2 * most + block)
    token = tl.load(order + place, mask=is_pair, other=0) // top_k
    to = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    group = to // GROUP
    column = group % 4 * quarter + group // 4 * GROUP + to % GROUP
    live = is_pair[:, None] & ((to < 4 * quarter) & (column < columns))[None, :]
    source = x + token.to(tl.int64)[:, None] * columns + column[None, :]
    found = tl.load(source, mask=live, other=0.0)
    live = is_pair[:, None] & (to < 4 * quarter)[None, :]
    tl.store(out + place.to(tl.int64)[:, None] * (4 * quarter) + to[None, :], found, mask=live)
