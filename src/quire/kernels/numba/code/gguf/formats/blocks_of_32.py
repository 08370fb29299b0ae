"""Blocks of 32 codes with one scale, and codes whose scales lie apart."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from quire.kernels.numba.code.gguf.dot import is_unsigned, words_of
from quire.kernels.numba.code.gguf.formats.format import Format
from quire.kernels.numba.code.gguf.reader import VECTORS, Reader, Step, constant


class FourBits(Format):
    """Q4_0, Q4_1: the first half of the codes is in the low nibbles."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.minima = int(name == "Q4_1")

    @property
    def offset(self) -> int:
        return 0 if self.minima else 8

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        at = 4 if self.minima else 2
        codes = reader.nibbles(at)
        minima = [reader.halves(2)] if self.minima else []
        return [Step(codes, [reader.halves(0)], minima)]


class FiveBits(Format):
    """Q5_0, Q5_1: as four bits; the fifth is bit k of a word."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.minima = int(name == "Q5_1")

    @property
    def offset(self) -> int:
        return 0 if self.minima else 16

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        at = 4 if self.minima else 2
        words = reader.load(reader.bytes, at)
        codes = reader.nibbles(at + 4)
        for j in range(VECTORS):
            count = reader.bytes.count
            byte = words_of(count)([i // 4 * 4 + j // 2 for i in range(count)])
            bits = reader.builder.shuffle_vector(words, reader.bytes(ir.Undefined), byte)
            mask = reader.bytes([1 << (4 * (j % 2) + i % 4) for i in range(count)])
            codes[j] = reader.with_fifth_bit(codes[j], bits, mask)
        minima = [reader.halves(2)] if self.minima else []
        return [Step(codes, [reader.halves(0)], minima)]


class EightBits(Format):
    """Q8_0: the codes have a sign."""

    @property
    def offset(self) -> int:
        return 128 if is_unsigned() else 0

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        codes = reader.codes(2)
        if is_unsigned():
            codes = [reader.builder.xor(each, constant(reader.bytes, 128)) for each in codes]
        return [Step(codes, [reader.halves(0)])]


class CodesApart(Format):
    """INT4, INT8: codes, whose scales and minima lie apart."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.minima = int(name == "INT4_ZEROS")

    @property
    def offset(self) -> int:
        if self.name == "INT8":
            return 128 if is_unsigned() else 0
        return 0 if self.minima else 8

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        if self.name == "INT8":
            codes = reader.codes(0)
            if is_unsigned():
                codes = [reader.builder.xor(each, constant(reader.bytes, 128)) for each in codes]
        else:
            codes = reader.nibbles(0)
        minima = [reader.part_apart(1)] if self.minima else []
        return [Step(codes, [reader.part_apart(0)], minima)]
