"""Tokens in the order of experts, a copy for each: so the hardware can copy tiles of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.pdl import pdl_launch, wait_then_trigger
from quire.kernels.triton.sizes import cdiv

_ROWS = 4  # of a program
_WIDTH = 1024  # columns that it copies together


def by_expert(x: Tensor, blocks: Blocks, top_k: int) -> Tensor:
    """`[pairs, columns]`: of each pair its token; what is in no block is left as it was."""
    columns = x.shape[1]
    out = torch.empty((len(blocks.order), columns), dtype=x.dtype, device=x.device)
    _gather[(blocks.number * (blocks.size // _ROWS), cdiv(columns, _WIDTH))](
        x,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        columns,
        top_k,
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
    top_k,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0) // (BLOCK // ROWS)
    first = tl.program_id(0) % (BLOCK // ROWS) * ROWS
    wait_then_trigger(PDL)  # the next kernel reads the table before it waits for this one
    if tl.load(table + block) < 0:
        return
    place = tl.load(table + most + block) + first + tl.arange(0, ROWS)
    is_pair = place < tl.load(table + 2 * most + block)
    token = tl.load(order + place, mask=is_pair, other=0) // top_k
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = is_pair[:, None] & (column < columns)[None, :]
    found = tl.load(x + token.to(tl.int64)[:, None] * columns + column[None, :], mask=live)
    tl.store(out + place.to(tl.int64)[:, None] * columns + column[None, :], found, mask=live)
