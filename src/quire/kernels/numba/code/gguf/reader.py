"""Loads from sixteen interleaved blocks, as the kernel of a product emits them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quire.kernels.numba.code.gguf.dot import INT8, INT32, bytes_of, register_lanes, words_of
from quire.kernels.numba.sizes import LANES, STEP

VECTORS = STEP // 4

INT64 = ir.IntType(64)


@dataclass
class Step:
    """Some rows' weights for 32 activations. With two scales, or minima, each is for half of
    them."""

    codes: Any  # vectors, by number
    scales: list[Any]
    minima: list[Any] = field(default_factory=list)

    @property
    def lanes(self) -> int:
        return int(self.scales[0].type.count)


class Reader:
    """Emits the loads from sixteen interleaved blocks that begin at `base`: those of `lanes` rows,
    which are part number `part` of the sixteen."""

    def __init__(
        self, builder: ir.IRBuilder, base: Any, lanes: int, part: Any, apart: Any = None
    ) -> None:
        self.builder, self.base, self.part = builder, base, part
        self.apart = apart  # scales that do not lie in blocks, and minima behind them
        self.words, self.floats = words_of(lanes), floats_of(lanes)
        self.bytes, self.narrow = bytes_of(lanes), ir.VectorType(INT8, lanes)
        self.half_floats = ir.VectorType(ir.HalfType(), lanes)

    def load(self, kind: ir.VectorType, at: Any, bytes_in: int = 0) -> Any:
        """What begins `at + bytes_in` bytes into a block; `at` may be known at run time only."""
        builder = self.builder
        if isinstance(at, int):
            at, bytes_in = INT64(0), at + bytes_in
        place = builder.gep(self.base, [builder.mul(at, INT64(LANES))])
        place = builder.gep(place, [INT64(LANES * bytes_in)])
        place = builder.gep(builder.bitcast(place, kind.as_pointer()), [self.part])
        return builder.load(place, align=1)

    def table(self, numbers: list[Any]) -> Any:
        """The numbers of sixteen rows each, on the stack."""
        table = cgutils.alloca_once(self.builder, self.floats, size=len(numbers))
        for i, each in enumerate(numbers):
            self.builder.store(each, self.builder.gep(table, [INT32(i)]))
        return table

    def part_of(self, table: Any, index: Any) -> Any:
        """Of the numbers of sixteen rows that are entry `index` of a table."""
        entry = self.builder.bitcast(self.builder.gep(table, [index]), self.floats.as_pointer())
        return self.builder.load(self.builder.gep(entry, [self.part]))

    def part_apart(self, index: int) -> Any:
        """Of the scales (0) or the minima (1) of sixteen rows that lie apart."""
        place = self.builder.gep(self.apart, [INT64(LANES * index)])
        place = self.builder.bitcast(place, self.floats.as_pointer())
        return self.builder.load(self.builder.gep(place, [self.part]), align=4)

    def codes(self, at: Any, bytes_in: int = 0) -> list[Any]:
        """Eight vectors of whole bytes."""
        return [self.load(self.bytes, at, bytes_in + 4 * j) for j in range(VECTORS)]

    def nibbles(self, at: Any, bytes_in: int = 0) -> list[Any]:
        """Eight vectors of codes of four bits: half of them are in the low nibbles of 16 bytes."""
        both = [self.load(self.bytes, at, bytes_in + 4 * j) for j in range(VECTORS // 2)]
        return [self.low(each) for each in both] + [self.high(each) for each in both]

    def halves(self, at: int) -> Any:
        return self.builder.fpext(self.load(self.half_floats, at), self.floats)

    def low(self, codes: Any, bits: int = 4) -> Any:
        return self.builder.and_(codes, constant(codes.type, (1 << bits) - 1))

    def high(self, codes: Any) -> Any:
        return self.builder.lshr(codes, constant(codes.type, 4))

    def field(self, codes: Any, first: int, bits: int) -> Any:
        """Some bits of each, from number `first` on."""
        if first:
            codes = self.builder.lshr(codes, constant(codes.type, first))
        return self.low(codes, bits) if first + bits < 8 else codes

    def numbers(self, narrow: Any, signed: bool = False) -> Any:
        """Bytes as numbers."""
        widen = self.builder.sext if signed else self.builder.zext
        return self.builder.sitofp(widen(narrow, self.words), self.floats)

    def with_fifth_bit(self, codes: Any, bits: Any, mask: Any) -> Any:
        """Codes plus 16 where `bits & mask` is not zero."""
        zero = constant(self.bytes, 0)
        is_set = self.builder.icmp_unsigned("!=", self.builder.and_(bits, mask), zero)
        fifth = self.builder.select(is_set, constant(self.bytes, 16), zero)
        return self.builder.or_(codes, fifth)


def steps_of(
    builder: ir.IRBuilder,
    format_: Any,
    weights: Any,
    apart: Any,
    first: Any,
    end: Any,
    begin_part: Callable[[Any, Any], None] | None = None,
) -> Iterator[tuple[Any, Any, Step]]:
    """Emits a walk over blocks `first` to `end` of sixteen rows: of a block part after part, as
    many rows as a register has lanes. Yields, inside of it, the part's number, a step's number,
    counted from `first`, and the step. `begin_part` may emit what to do at the beginning of a part,
    whose block is at an address. `apart`: see `tile.py`."""
    scales, scale_stride, blocks_of_scale = cgutils.unpack_tuple(builder, apart, 3)
    lanes = register_lanes()
    chunk_steps = format_.block.values // STEP // format_.chunks
    with cgutils.for_range(builder, builder.sub(end, first)) as loop:
        block = builder.add(first, loop.index)
        base = builder.gep(weights, [builder.mul(block, INT64(LANES * format_.block.bytes))])
        prepared = format_.prepare(Reader(builder, base, LANES, INT64(0)))
        before = builder.mul(loop.index, INT64(format_.chunks))
        with cgutils.for_range(builder, INT64(LANES // lanes)) as parts:
            scale = builder.udiv(block, blocks_of_scale)
            own_scales = builder.gep(scales, [builder.mul(scale, scale_stride)])
            reader = Reader(builder, base, lanes, parts.index, own_scales)
            if begin_part:
                begin_part(base, parts.index)
            with cgutils.for_range(builder, INT64(format_.chunks)) as chunks:
                chunk = builder.add(before, chunks.index)
                start = builder.mul(chunk, INT64(chunk_steps))
                for i, step in enumerate(format_.steps(reader, prepared, chunks.index)):
                    yield parts.index, builder.add(start, INT64(i)), step


def floats_of(lanes: int) -> ir.VectorType:
    return ir.VectorType(ir.FloatType(), lanes)


def constant(kind: ir.VectorType, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)
