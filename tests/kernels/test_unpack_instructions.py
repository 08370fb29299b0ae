"""The instructions that unpack four-bit codes on a GPU, followed one by one without one."""

from __future__ import annotations

import importlib.util
import operator
import re

import pytest
import torch
from torch import Tensor

from quire.kernels.dequantise import E2M1, unpack_nibbles
from quire.kernels.four_bits import from_quarters

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, whose kernels have them"
)

WORDS = torch.arange(1 << 16)
BITS = {
    "and": operator.and_,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "mul.lo": operator.mul,
}


def follow(asm: str, shift: int, scale: float, offset: float) -> Tensor:
    """What becomes of each word in the half of a register that is `shift` bits up, beside its
    inverse in the other half."""
    registers = {"$1": WORDS << shift | (0xFFFF - WORDS) << (16 - shift)}
    for line in re.findall(r"^(?:and|shl|shr|lop3|add|mul)\..*;$", asm, re.MULTILINE):
        name, arguments = line.rstrip(";").split(" ", 1)
        target, *sources = [each.strip() for each in arguments.split(",")]
        operation = name.rsplit(".", 1)[0].removesuffix(".rn")
        if operation in ("add", "mul"):
            numbers = as_number(registers[sources[0]] >> shift)
            result = numbers + offset if operation == "add" else numbers * scale
            registers[target] = result.view(torch.uint16).to(torch.int64) << shift
            continue
        a, b, *more = (registers[s] if s in registers else int(s, 0) for s in sources)
        if operation == "lop3":
            assert more[1] == 0xEA  # a and b, or c
            found = (a & b) | more[0]
        else:
            found = BITS[operation](a, b)
        registers[target] = found & 0xFFFF_FFFF
    return as_number(registers["$0"] >> shift).float()


def as_number(bits: Tensor) -> Tensor:
    return (bits & 0xFFFF).to(torch.uint16).view(torch.bfloat16)


def codes_of(is_whole: bool) -> list[Tensor]:
    """Of every word, the code of each quarter; columns are 4 * 32 to a row."""
    rows = (WORDS - (WORDS >> 15 << 16)).to(torch.int16).view(-1, 32)
    return [
        each.flatten() for each in unpack_nibbles(from_quarters(rows, 128, is_whole)).chunk(4, 1)
    ]


@pytest.mark.parametrize("shift", [0, 16])
@pytest.mark.parametrize("quarter", range(4))
def test_e2m1(quarter: int, shift: int) -> None:
    from quire.kernels.triton.experts import unpack

    asm = (unpack.FIRST, unpack.SECOND, unpack.THIRD, unpack.FOURTH)[quarter].value
    found = follow(asm, shift, 2.0**unpack.IN_SCALES.value, 0.0) * unpack.DIVISOR.value
    numbers = torch.tensor([*E2M1, *(-size for size in E2M1)])
    assert torch.equal(found, numbers[codes_of(is_whole=False)[quarter].long()])


@pytest.mark.parametrize("shift", [0, 16])
@pytest.mark.parametrize("quarter", range(4))
def test_whole_numbers(quarter: int, shift: int) -> None:
    from quire.kernels.triton.experts import unpack

    names = (unpack._WHOLE_0, unpack._WHOLE_1, unpack._WHOLE_2, unpack._WHOLE_3)
    found = follow(names[quarter].value, shift, 0.5, -128.0 - 7)
    assert torch.equal(found, (codes_of(is_whole=True)[quarter].float() - 7) * 0.5)


def run(asm: str, inputs: list[int], outputs: int) -> list[int]:
    """What instructions on bits leave in the first registers, given what is in those after them."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for line in re.findall(r"^(?:and|xor|shl|lop3|prmt)\.b32 .*;$", asm, re.MULTILINE):
        name, arguments = line.rstrip(";").split(" ", 1)
        target, *sources = [each.strip() for each in arguments.split(",")]
        a, b, *more = (registers[s] if s in registers else int(s, 0) for s in sources)
        if name == "lop3.b32":
            assert more[1] == 0x6A  # a and b, then exclusive or with c
            found = (a & b) ^ more[0]
        elif name == "prmt.b32":
            both = (a | b << 32).to_bytes(8, "little")
            found = int.from_bytes([both[more[0] >> (4 * i) & 7] for i in range(4)], "little")
        else:
            found = {"xor": operator.xor, **BITS}[name.removesuffix(".b32")](a, b)
        registers[target] = found & 0xFFFF_FFFF
    return [registers[f"${i}"] for i in range(outputs)]


def signed_bytes(registers: list[int]) -> list[list[int]]:
    return [list(memoryview(r.to_bytes(4, "little")).cast("b")) for r in registers]


def test_codes_as_signed_bytes() -> None:
    """Of two registers of words, the codes of even chunks, then those of odd ones."""
    from quire.kernels.triton.int4 import digits

    words = torch.randint(0, 1 << 16, (50, 4), generator=torch.Generator().manual_seed(1)).tolist()
    for a, b, c, d in words:
        found = signed_bytes(run(digits._SIGNED.value, [a | b << 16, c | d << 16], 4))
        for i, pair in enumerate([(a, b), (c, d)]):
            for odd in (0, 1):
                codes = [word >> (4 * chunk) & 15 for word in pair for chunk in (odd, odd + 2)]
                assert found[2 * i + odd] == [16 * (code - 8) for code in codes]


def test_digits_of_rounded_numbers() -> None:
    from quire.kernels.triton.int4 import digits

    numbers = torch.randint(-16384, 16385, (50, 4), generator=torch.Generator().manual_seed(2))
    numbers[0] = torch.tensor([-16384, 16384, 127, 128])
    bits = (numbers.float() + digits._ROUNDER.value).view(torch.int32)
    for row, wanted in zip(bits.tolist(), numbers.tolist(), strict=True):
        high, low = signed_bytes(run(digits._BOTH.value, row, 2))
        assert [256 * upper + lower for upper, lower in zip(high, low, strict=True)] == wanted


def test_bfloat16_numbers_are_widened() -> None:
    from quire.kernels.triton import digit_steps

    assert run(digit_steps._WIDE.value, [0xC0DE3F80], 2) == [0x3F800000, 0xC0DE0000]


@pytest.mark.parametrize("quarter", range(4))
def test_scales_two_in_a_register(quarter: int) -> None:
    """A shift and a mask make the scales of two quarters; instructions take one for both numbers,
    and are those of `unpack.py` otherwise."""
    hopper_unpack = pytest.importorskip("quire.kernels.triton.experts.hopper_unpack")
    word = int.from_bytes(bytes([3, 144, 18, 127]), "little")
    even, odd = (word << 7) & 0x7F807F80, (word >> 1) & 0x7F807F80
    original = hopper_unpack._EACH[quarter].value
    asm = hopper_unpack._by_pairs(quarter, original)
    [(register, half)] = re.findall(
        r"mov\.b32 \{lo, hi\}, \$(\d);\nmov\.b32 s, \{(lo|hi), \2\};", asm
    )
    pair = {"3": even, "5": odd}[register]
    exponent = word >> (8 * quarter) & 255
    assert (pair & 0xFFFF if half == "lo" else pair >> 16) == exponent << 7
    kept = [line for line in asm.splitlines() if not line.startswith(("mov", ".reg .b16"))]
    kept.remove(".reg .b32 s;")
    names = {f"${quarter % 2}": "$0", "$2": "$1"}
    plain = re.sub(r"\$\d", lambda found: names[found[0]], "\n".join(kept))
    assert re.sub(r"\bs;", "$2;", plain).split() == original.split()
