"""AMX in plain instructions: what its instructions do, for machines that have none.

    python tests/plain_amx.py TENSORS

TENSORS holds matrices by type, of 32 rows, and activations; the file then holds their products, as
kernels for AMX compute them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils

from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_product import product_with
from quire.kernels.numba import host

BYTE, WORD, INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
TILE_BYTES, ROW_BYTES = 1024, 64


class Unit:
    """The tiles, and their shapes, of one function, in its memory."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.shapes = cgutils.alloca_once(builder, BYTE, size=64)
        self.tiles = cgutils.alloca_once(builder, BYTE, size=8 * TILE_BYTES)

    def ldtilecfg(self, b: Any, place: Any) -> None:
        with cgutils.for_range(b, INT64(64)) as each:
            b.store(b.load(b.gep(place, [each.index])), b.gep(self.shapes, [each.index]))

    def tilerelease(self, b: Any) -> None:
        pass

    def tilezero(self, b: Any, tile: Any) -> None:
        with cgutils.for_range(b, INT64(TILE_BYTES)) as each:
            b.store(BYTE(0), self._place(b, tile, INT64(0), each.index))

    def tileloadd64(self, b: Any, tile: Any, memory: Any, stride: Any) -> None:
        self._move(b, tile, memory, stride, is_load=True)

    def tilestored64(self, b: Any, tile: Any, memory: Any, stride: Any) -> None:
        self._move(b, tile, memory, stride, is_load=False)

    def tdpbsud(self, b: Any, sums: Any, left: Any, right: Any) -> None:
        rows, size = self._shape(b, left)
        columns = b.udiv(self._shape(b, right)[1], INT64(4))
        with (
            cgutils.for_range(b, rows) as row,
            cgutils.for_range(b, size) as k,
            cgutils.for_range(b, columns) as column,
        ):
            four = b.add(b.mul(column.index, INT64(4)), b.urem(k.index, INT64(4)))
            first = b.load(self._place(b, left, row.index, k.index))
            second = b.load(self._place(b, right, b.udiv(k.index, INT64(4)), four))
            place = self._place(b, sums, row.index, b.mul(column.index, INT64(4)))
            place = b.bitcast(place, WORD.as_pointer())
            product = b.mul(b.sext(first, WORD), b.zext(second, WORD))
            b.store(b.add(b.load(place), product), place)

    def _move(self, b: Any, tile: Any, memory: Any, stride: Any, is_load: bool) -> None:
        rows, row_bytes = self._shape(b, tile)
        with cgutils.for_range(b, rows) as row, cgutils.for_range(b, row_bytes) as byte:
            outside = b.gep(memory, [b.add(b.mul(row.index, stride), byte.index)])
            inside = self._place(b, tile, row.index, byte.index)
            source, target = (outside, inside) if is_load else (inside, outside)
            b.store(b.load(source), target)

    def _shape(self, b: Any, tile: Any) -> tuple[Any, Any]:
        rows = b.load(b.gep(self.shapes, [INT64(48 + tile.constant)]))
        row_bytes = b.load(b.gep(self.shapes, [INT64(16 + 2 * tile.constant)]))
        return b.zext(rows, INT64), b.zext(row_bytes, INT64)

    def _place(self, b: Any, tile: Any, row: Any, byte: Any) -> Any:
        at = b.add(b.mul(row, INT64(ROW_BYTES)), byte)
        return b.gep(self.tiles, [b.add(at, INT64(TILE_BYTES * tile.constant))])


units: dict[str, Unit] = {}  # by functions


def call(builder: ir.IRBuilder, name: str, *arguments: Any) -> None:
    function = builder.function.name
    if function not in units:
        units[function] = Unit(builder)
    getattr(units[function], name)(builder, *arguments)


def pretend() -> None:
    """Kernels that are compiled from now on are those of a machine with AMX."""
    host.has_amx = lambda: True
    from quire.kernels.numba import product
    from quire.kernels.numba.code.gguf import dot

    product.has_amx = dot.has_amx = dot.is_unsigned = lambda: True
    dot.takes_words = lambda: False
    from quire.kernels.numba.code.gguf import amx

    amx.call = call


def main(path: str) -> None:
    pretend()
    torch.set_num_threads(2)
    matrices, x = torch.load(path)
    products = [product_with(TYPES[type_], weights, 32) for type_, weights in matrices.items()]
    found = [(product(x, None), product(x, None, gated=True)) for product in products]
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
