"""Which scales go with a rank's part of a matrix: one for each block of rows and columns."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch

from quire.errors import ModelError
from quire.kernels.gguf_blocks import BlockType
from quire.layers.weights import Fused, Weight, ranges, span


def in_blocks(whole: Weight, rows: int, columns: int) -> Weight:
    """The tensor that has one element for each block of a matrix, where `whole` has one for each
    number: its shape, and the part of it that goes with this rank's part of the matrix.

    A part within one block takes that block's element. Any other has to begin with a block, and to
    end with one or with the matrix.
    """
    height, width = whole.shape
    own_rows, own_columns = ranges(whole.shape, whole.part)
    return replace(
        whole,
        shape=(-(-height // rows), -(-width // columns)),
        part=(
            _blocks(whole.name, "outputs", height, own_rows, rows),
            _blocks(whole.name, "inputs", width, own_columns, columns),
        ),
        fused=_fused(whole, rows),
        order=_order(whole, rows),
    )


def refuse_ragged(whole: Weight, columns: int) -> None:
    """Refuse groups of inputs of which the last would be shorter."""
    if whole.shape[1] % columns:
        raise ModelError(
            f"{whole.name} has {whole.shape[1]:,} inputs, which groups of {columns:,} do not "
            f"divide, and Quire reads no shorter last group: choose a model in smaller groups, or "
            f"its original weights."
        )


def _blocks(name: str, what: str, total: int, part: range, size: int) -> slice:
    if not part:
        return slice(0, 0)
    blocks = range(part.start // size, -(-part.stop // size))
    begins = part.start % size == 0
    ends = part.stop % size == 0 or part.stop == total
    if len(blocks) > 1 and not (begins and ends):
        raise ModelError(
            f"{name} is quantised in blocks of {size:,} {what}, and a part of {len(part):,} of its "
            f"{total:,} begins or ends within one: choose a smaller tensor_parallel_size."
        )
    return span(blocks)


def _fused(whole: Weight, rows: int) -> Fused | None:
    fused = whole.fused
    if fused is None:
        return None
    if fused.start % rows:
        # Only a checkpoint that has the fused tensor needs it, and is refused for this one.
        return None
    return replace(fused, start=fused.start // rows, rows=-(-fused.rows // rows))


def _leaves_block(order: tuple[int, ...], rows: int) -> bool:
    """Whether a row of some head changes to another block of so many."""
    size = len(order)
    heads = rows // gcd(size, rows)  # behind so many, heads lie over blocks as the first ones do
    return any(
        (start + i) // rows != (start + row) // rows
        for start in range(0, heads * size, size)
        for i, row in enumerate(order)
    )


def _order(whole: Weight, rows: int) -> tuple[int, ...]:
    """Rows change places within a head: scales do so too, where one belongs to a single row, and
    stay where no row leaves its block."""
    if rows == 1 or not whole.order or not _leaves_block(whole.order, rows):
        return whole.order if rows == 1 else ()
    raise ModelError(
        f"{whole.name} is quantised in blocks of {rows:,} outputs, across heads of "
        f"{len(whole.order):,} whose rows Quire reorders: use the model's original weights."
    )


def stored_columns(whole: Weight, kind: BlockType) -> Weight:
    """The bytes that hold this rank's part of a matrix."""
    mine, columns = ranges(whole.shape, whole.part)
    size = kind.values
    if columns.start % size or columns.stop % size:
        others = " enable_expert_parallel," if ".experts." in whole.name else ""
        raise ModelError(
            f"{whole.name} is {kind.name}, in blocks of {size} values, and this rank would"
            f" have values {columns.start:,} to {columns.stop:,} of {whole.shape[1]:,}; use"
            f" fewer ranks,{others} or a dtype, which the weights are then turned into."
        )
    stored = slice(*(each // size * kind.bytes for each in (columns.start, columns.stop)))
    return replace(
        whole,
        shape=(whole.shape[0], whole.shape[1] // size * kind.bytes),
        part=(slice(mine.start, mine.stop), stored),
        dtypes=(torch.uint8,),
    )
