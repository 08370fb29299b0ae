"""Types whose codes of four bits are numbers of a table."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from quire.kernels.numba.code.gguf.dot import is_unsigned
from quire.kernels.numba.code.gguf.formats.format import Format
from quire.kernels.numba.code.gguf.lookup import look_up
from quire.kernels.numba.code.gguf.reader import Reader, Step, constant

DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
FP4 = (*DOUBLED_FP4, *(-each for each in DOUBLED_FP4))


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
