"""Tokens in the order of experts, a copy for each pair: so the hardware can copy tiles of them."""

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
    return _gathered(x, blocks, top_k, len(blocks.order), is_padded=False)


def by_block(x: Tensor, blocks: Blocks, top_k: int) -> Tensor:
    """`[blocks.rows, columns]`: block `b` begins at row `b * blocks.size`, with the tokens of its
    pairs, and has zeros behind them. A block of no expert is left as it was.

    A product multiplies all rows of a block, also those that no pair has. Tensor cores take less
    energy for zeros than for other numbers, and a GPU at its power limit is faster for it.
    """
    return _gathered(x, blocks, top_k, blocks.rows, is_padded=True)


def _gathered(x: Tensor, blocks: Blocks, top_k: int, rows: int, is_padded: bool) -> Tensor:
    columns = x.shape[1]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    _gather[(blocks.number * (blocks.size // _ROWS), cdiv(columns, _WIDTH))](
        x,
        out,
        blocks.order,
        blocks.table,
        blocks.number,
        columns,
        top_k,
        PADDED=is_padded,
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
    PADDED: tl.constexpr,
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
    found = tl.load(x + token.to(tl.int64)[:, None] * columns + column[None, :], mask=live, other=0)
    if PADDED:
        place = block * BLOCK + first + tl.arange(0, ROWS)
        live = (column < columns)[None, :]
    tl.store(out + place.to(tl.int64)[:, None] * columns + column[None, :], found, mask=live)
