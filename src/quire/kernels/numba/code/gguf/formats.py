"""How the blocks of each of GGUF's types become codes of a byte, scales and minima.

A step of a product goes over 32 activations. What it needs of a few rows, as many as a register has
lanes, is eight vectors, each with four neighbouring codes of every row, and the scales and minima:

    weight = scale * (code - offset) + minimum

Blocks of 256 (the K types) are walked in chunks of a few steps each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quire.kernels.gguf_blocks import CODES, TYPES
from quire.kernels.numba.code.gguf.dot import (
    INT8,
    INT32,
    is_unsigned,
    join_tops,
    splat,
    words_of,
)
from quire.kernels.numba.code.gguf.reader import INT64, VECTORS, Reader, Step, constant


class Format:
    """One of GGUF's types, for the kernel that multiplies with it."""

    chunks = 1  # of a block
    scales = 1  # of a step
    has_minimum = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.block = TYPES.get(name) or CODES[name]

    @property
    def offset(self) -> int:
        return 0

    def prepare(self, reader: Reader) -> Any:
        """What all chunks of a block need, of all sixteen rows."""
        return None

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        raise NotImplementedError


class FourBits(Format):
    """Q4_0, Q4_1: the first half of the codes is in the low nibbles."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.has_minimum = name == "Q4_1"

    @property
    def offset(self) -> int:
        return 0 if self.has_minimum else 8

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        at = 4 if self.has_minimum else 2
        nibbles = [reader.load(reader.bytes, at + 4 * j) for j in range(4)]
        codes = [reader.low(each) for each in nibbles] + [reader.high(each) for each in nibbles]
        minimum = reader.halves(2) if self.has_minimum else None
        return [Step(codes, [reader.halves(0)], minimum)]


class FiveBits(Format):
    """Q5_0, Q5_1: as four bits; the fifth is bit k of a word."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.has_minimum = name == "Q5_1"

    @property
    def offset(self) -> int:
        return 0 if self.has_minimum else 16

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        at = 4 if self.has_minimum else 2
        words = reader.load(reader.bytes, at)
        nibbles = [reader.load(reader.bytes, at + 4 + 4 * j) for j in range(4)]
        codes = [reader.low(each) for each in nibbles] + [reader.high(each) for each in nibbles]
        for j in range(VECTORS):
            count = reader.bytes.count
            byte = words_of(count)([i // 4 * 4 + j // 2 for i in range(count)])
            bits = reader.builder.shuffle_vector(words, reader.bytes(ir.Undefined), byte)
            mask = reader.bytes([1 << (4 * (j % 2) + i % 4) for i in range(count)])
            codes[j] = reader.with_fifth_bit(codes[j], bits, mask)
        minimum = reader.halves(2) if self.has_minimum else None
        return [Step(codes, [reader.halves(0)], minimum)]


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
        self.has_minimum = name == "INT4_ZEROS"

    @property
    def offset(self) -> int:
        if self.name == "INT8":
            return 128 if is_unsigned() else 0
        return 0 if self.has_minimum else 8

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        if self.name == "INT8":
            codes = reader.codes(0)
            if is_unsigned():
                codes = [reader.builder.xor(each, constant(reader.bytes, 128)) for each in codes]
        else:
            nibbles = [reader.load(reader.bytes, 4 * j) for j in range(4)]
            codes = [reader.low(each) for each in nibbles] + [reader.high(each) for each in nibbles]
        minimum = reader.part_apart(1) if self.has_minimum else None
        return [Step(codes, [reader.part_apart(0)], minimum)]


class Fp4(Format):
    """MXFP4: numbers of four bits, doubled here, which makes them whole: 0, 1, 2, 3, 4, 6, 8, 12,
    and with their top bit negative. A scale is a power of two, of which a byte is the exponent."""

    @property
    def offset(self) -> int:
        return 12

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        nibbles = [reader.load(reader.bytes, 1 + 4 * j) for j in range(4)]
        codes = [reader.low(each) for each in nibbles] + [reader.high(each) for each in nibbles]
        return [Step([self._doubled(reader, each) for each in codes], [self._scale(reader)])]

    def _doubled(self, reader: Reader, code: Any) -> Any:
        """The number, plus 12."""
        builder = reader.builder
        zero, middle = constant(reader.bytes, 0), constant(reader.bytes, self.offset)
        size = number = reader.low(code, bits=3)
        for least, more in ((5, 1), (6, 1), (7, 3)):
            is_more = builder.icmp_unsigned(">=", size, constant(reader.bytes, least))
            added = builder.select(is_more, constant(reader.bytes, more), zero)
            number = builder.add(number, added)
        is_negative = builder.icmp_unsigned(">=", code, constant(reader.bytes, 8))
        signs = builder.sub(middle, number), builder.add(middle, number)
        return builder.select(is_negative, *signs)

    def _scale(self, reader: Reader) -> Any:
        builder = reader.builder
        exponent = builder.zext(reader.load(reader.narrow, 0), reader.words)
        bits = builder.shl(exponent, constant(reader.words, 23))
        half = ir.Constant(reader.floats, [0.5] * reader.floats.count)
        return builder.fmul(builder.bitcast(bits, reader.floats), half)


class FourOrFiveBitsK(Format):
    """Q4_K, Q5_K: eight steps, each with a scale and a minimum of six bits.

    A chunk is 32 bytes: its low nibbles are one step, its high ones the next. The fifth bits are in
    32 bytes, those of step `s` in bit `s`.
    """

    chunks = 4
    has_minimum = True

    def prepare(self, reader: Reader) -> Any:
        """Scales and minima of all steps, on the stack."""
        builder = reader.builder
        scale, minimum = reader.halves(0), builder.fneg(reader.halves(2))
        packed = [reader.load(reader.narrow, 4 + i) for i in range(12)]

        def top(each: Any) -> Any:
            two = builder.lshr(each, constant(reader.narrow, 6))
            return builder.shl(two, constant(reader.narrow, 4))

        table = cgutils.alloca_once(builder, reader.floats, size=16)
        for step in range(8):
            if step < 4:
                six = reader.low(packed[step], 6), reader.low(packed[step + 4], 6)
            else:
                both = packed[step + 4]
                six = (
                    builder.or_(reader.low(both), top(packed[step - 4])),
                    builder.or_(reader.high(both), top(packed[step])),
                )
            for which, (bits, factor) in enumerate(zip(six, (scale, minimum), strict=True)):
                number = builder.fmul(reader.numbers(bits), factor)
                builder.store(number, builder.gep(table, [INT32(2 * step + which)]))
        return table

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
            at = builder.mul(step, INT64(2))
            scale = reader.part_of(prepared, at)
            minimum = reader.part_of(prepared, builder.add(at, INT64(1)))
            found.append(Step(codes, [scale], minimum))
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
        builder = reader.builder
        scale = reader.halves(208)
        table = cgutils.alloca_once(builder, reader.floats, size=16)
        for i in range(16):
            narrow = reader.load(reader.narrow, 192 + i)
            number = builder.fmul(reader.numbers(narrow, signed=True), scale)
            builder.store(number, builder.gep(table, [INT32(i)]))
        return table

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
            scales = [
                reader.part_of(prepared, builder.add(at, INT64(2 * step + i))) for i in range(2)
            ]
            found.append(Step(codes, scales))
        return found


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        FourBits("Q4_0"),
        FourBits("Q4_1"),
        FiveBits("Q5_0"),
        FiveBits("Q5_1"),
        EightBits("Q8_0"),
        Fp4("MXFP4"),
        FourOrFiveBitsK("Q4_K"),
        FourOrFiveBitsK("Q5_K"),
        SixBitsK("Q6_K"),
        *map(CodesApart, CODES),
    )
}
