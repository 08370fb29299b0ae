"""The K types: blocks of 256, whose steps have scales, and minima, of a few bits each."""

from __future__ import annotations

from typing import Any

from quire.kernels.numba.code.gguf.dot import INT8, join_tops, splat
from quire.kernels.numba.code.gguf.formats.format import Format
from quire.kernels.numba.code.gguf.reader import INT64, Reader, Step, constant


class TwoBitsK(Format):
    """Q2_K: each half of a step has a scale and a minimum of four bits. A chunk is half a block:
    32 bytes, of which each step has two bits."""

    chunks = 2
    scales = 2
    minima = 2

    def prepare(self, reader: Reader) -> Any:
        """All scales, and behind them all minima, on the stack."""
        packed = [reader.load(reader.narrow, i) for i in range(16)]
        scale, minimum = reader.halves(80), reader.builder.fneg(reader.halves(82))
        scales = [_times(reader, reader.low(each), scale) for each in packed]
        minima = [_times(reader, reader.high(each), minimum) for each in packed]
        return reader.table(scales + minima)

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        fours = reader.codes(reader.builder.mul(chunk, INT64(32)), 16)
        at = reader.builder.mul(chunk, INT64(8))
        found = []
        for step in range(4):
            codes = [reader.field(each, 2 * step, 2) for each in fours]
            scales = _entries(reader, prepared, at, 2 * step, 2)
            found.append(Step(codes, scales, _entries(reader, prepared, at, 16 + 2 * step, 2)))
        return found


class ThreeBitsK(Format):
    """Q3_K: sixteen scales of six bits. In memory a chunk is two steps, whose codes make six bits;
    they, and the scales, are four to three bytes (`kernels/gguf_bits.py`)."""

    chunks = 4
    scales = 2

    @property
    def offset(self) -> int:
        return 4

    def prepare(self, reader: Reader) -> Any:
        """All scales, on the stack."""
        scale = reader.halves(108)
        packed = [reader.load(reader.narrow, 96 + i) for i in range(12)]
        sixes = [reader.low(each, bits=6) for each in packed]
        sixes += [join_tops(reader.builder, *packed[i::4]) for i in range(4)]
        return reader.table([_times(reader, _less_32(reader, six), scale, True) for six in sixes])

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        start = reader.builder.mul(chunk, INT64(24))
        packed = [reader.load(reader.bytes, start, 4 * i) for i in range(6)]
        sevenths = [join_tops(reader.builder, *packed[i::2]) for i in range(2)]
        both = packed + sevenths
        at = reader.builder.mul(chunk, INT64(4))
        return [
            Step(
                [reader.field(each, 3 * step, 3) for each in both],
                _entries(reader, prepared, at, 2 * step, 2),
            )
            for step in range(2)
        ]


class FourOrFiveBitsK(Format):
    """Q4_K, Q5_K: eight steps, each with a scale and a minimum of six bits.

    A chunk is 32 bytes: its low nibbles are one step, its high ones the next. The fifth bits are in
    32 bytes, those of step `s` in bit `s`.
    """

    chunks = 4
    minima = 1

    def prepare(self, reader: Reader) -> Any:
        """Scales and minima of all steps, on the stack."""
        builder = reader.builder
        factors = reader.halves(0), builder.fneg(reader.halves(2))
        packed = [reader.load(reader.narrow, 4 + i) for i in range(12)]

        def top(each: Any) -> Any:
            two = builder.lshr(each, constant(reader.narrow, 6))
            return builder.shl(two, constant(reader.narrow, 4))

        numbers = []
        for step in range(8):
            if step < 4:
                six = reader.low(packed[step], 6), reader.low(packed[step + 4], 6)
            else:
                both = packed[step + 4]
                six = (
                    builder.or_(reader.low(both), top(packed[step - 4])),
                    builder.or_(reader.high(both), top(packed[step])),
                )
            numbers += [_times(reader, *each) for each in zip(six, factors, strict=True)]
        return reader.table(numbers)

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        builder = reader.builder
        five = self.name == "Q5_K"
        start = builder.mul(chunk, INT64(32))
        nibbles = reader.codes(start, 48 if five else 16)
        found = []
        for half in range(2):
            codes = [(reader.high if half else reader.low)(each) for each in nibbles]
            step = builder.add(builder.mul(chunk, INT64(2)), INT64(half))
            if five:
                bit = builder.shl(INT8(1), builder.trunc(step, INT8))
                mask = splat(builder, bit, reader.bytes)
                fifths = reader.codes(16)
                codes = [
                    reader.with_fifth_bit(each, bits, mask)
                    for each, bits in zip(codes, fifths, strict=True)
                ]
            scale, minimum = _entries(reader, prepared, builder.mul(step, INT64(2)), 0, 2)
            found.append(Step(codes, [scale], [minimum]))
        return found


class SixBitsK(Format):
    """Q6_K: sixteen scales of eight bits. A chunk is half a block, of four steps: three have the
    lower six bits of 32 bytes each, and the fourth has the upper two of all of them."""

    chunks = 2
    scales = 2

    @property
    def offset(self) -> int:
        return 32

    def prepare(self, reader: Reader) -> Any:
        """All scales, on the stack."""
        scale = reader.halves(208)
        packed = [reader.load(reader.narrow, 192 + i) for i in range(16)]
        return reader.table([_times(reader, each, scale, True) for each in packed])

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        builder = reader.builder
        start = builder.mul(chunk, INT64(96))
        threes = [reader.codes(start, 32 * i) for i in range(3)]
        fourth = [join_tops(builder, *each) for each in zip(*threes, strict=True)]
        at = builder.mul(chunk, INT64(8))
        found = []
        for step in range(4):
            codes = fourth
            if step < 3:
                codes = [reader.low(each, bits=6) for each in threes[step]]
            found.append(Step(codes, _entries(reader, prepared, at, 2 * step, 2)))
        return found


def _times(reader: Reader, narrow: Any, factor: Any, signed: bool = False) -> Any:
    """Numbers of a byte, times a number of each row."""
    return reader.builder.fmul(reader.numbers(narrow, signed), factor)


def _less_32(reader: Reader, narrow: Any) -> Any:
    return reader.builder.sub(narrow, constant(reader.narrow, 32))


def _entries(reader: Reader, table: Any, at: Any, first: int, count: int) -> list[Any]:
    """Some neighbouring entries of a table, from `at + first` on."""
    places = [reader.builder.add(at, INT64(first + i)) for i in range(count)]
    return [reader.part_of(table, place) for place in places]
