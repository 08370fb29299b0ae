"""Types whose codes of four bits are numbers of a table."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from quire.kernels.numba.code.gguf.dot import is_unsigned
from quire.kernels.numba.code.gguf.formats.format import Format
from quire.kernels.numba.code.gguf.lookup import look_up
from quire.kernels.numba.code.gguf.reader import INT64, Reader, Step, constant

DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
FP4 = (*DOUBLED_FP4, *(-each for each in DOUBLED_FP4))
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class TableFormat(Format):
    """One of these types: the codes of a step are 16 bytes, the first half in the low nibbles."""

    numbers: tuple[int, ...]

    @property
    def offset(self) -> int:
        """As little as makes all of them positive, where they have to be."""
        return -min(self.numbers) if is_unsigned() else 0

    def codes(self, reader: Reader, at: Any, bytes_in: int = 0) -> list[Any]:
        entries = [number + self.offset for number in self.numbers]
        nibbles = reader.nibbles(at, bytes_in)
        return [look_up(reader.builder, each, entries) for each in nibbles]


class Fp4(TableFormat):
    """MXFP4: numbers of four bits, doubled here, which makes them whole. A scale is a power of two,
    of which a byte is the exponent."""

    numbers = FP4

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        return [Step(self.codes(reader, 1), [self._scale(reader)])]

    def _scale(self, reader: Reader) -> Any:
        builder = reader.builder
        exponent = builder.zext(reader.load(reader.narrow, 0), reader.words)
        bits = builder.shl(exponent, constant(reader.words, 23))
        half = ir.Constant(reader.floats, [0.5] * reader.floats.count)
        return builder.fmul(builder.bitcast(bits, reader.floats), half)


class NonLinear(TableFormat):
    """IQ4_NL: numbers that are the closer together, the smaller they are."""

    numbers = NON_LINEAR

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        return [Step(self.codes(reader, 2), [reader.halves(0)])]


class NonLinearK(TableFormat):
    """IQ4_XS: the same numbers, in blocks of 256 with eight scales of six bits. A chunk is one
    step. The upper two bits of four scales are in one byte, the lower four of two in another."""

    chunks = 8
    numbers = NON_LINEAR

    def prepare(self, reader: Reader) -> Any:
        """All scales, on the stack."""
        scale = reader.halves(0)
        return reader.table(
            [reader.builder.fmul(self._six_bits(reader, i), scale) for i in range(self.chunks)]
        )

    def _six_bits(self, reader: Reader, index: int) -> Any:
        builder = reader.builder
        upper = reader.field(reader.load(reader.narrow, 2 + index // 4), 2 * (index % 4), 2)
        lower = reader.field(reader.load(reader.narrow, 4 + index // 2), 4 * (index % 2), 4)
        six = builder.or_(lower, builder.shl(upper, constant(reader.narrow, 4)))
        return reader.numbers(builder.sub(six, constant(reader.narrow, 32)), signed=True)

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        codes = self.codes(reader, reader.builder.mul(chunk, INT64(16)), 8)
        return [Step(codes, [reader.part_of(prepared, chunk)])]
