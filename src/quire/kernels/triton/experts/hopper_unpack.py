"""From MXFP4 codes in shared memory to left factors of tensor cores, by the instructions of
`unpack.py`, whose functions are Triton's; these are Gluon's."""

from __future__ import annotations

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.experts import unpack

# What a scale has more than its exponent, for each of the four in a word.
_ADDED: gl.constexpr = gl.constexpr(unpack.IN_SCALES.value * 0x01010101)


_EACH = (unpack.FIRST, unpack.SECOND, unpack.THIRD, unpack.FOURTH)


def _by_pairs(quarter: int, asm: str) -> str:
    """The same of scales that lie two in a register: of the first and third quarter, and of the
    others. The multiplication takes one of them for both numbers."""
    half = "lo" if quarter < 2 else "hi"
    names = {"0": f"${quarter % 2}", "1": "$2", "2": "s"}
    asm = re.sub(r"\$(\d)", lambda found: names[found[1]], asm)
    select = (
        f".reg .b16 lo, hi;\n.reg .b32 s;\n"
        f"mov.b32 {{lo, hi}}, ${3 + 2 * (quarter % 2)};\nmov.b32 s, {{{half}, {half}}};\n"
    )
    return asm.replace(".reg .b32 m;\n", ".reg .b32 m;\n" + select)


def _both(first: int) -> gl.constexpr:
    """Two quarters, whose scales are in the same halves of the two registers."""
    lines = (_by_pairs(quarter, _EACH[quarter].value) for quarter in (first, first + 1))
    return gl.constexpr("\n".join(lines))


_FIRST_TWO: gl.constexpr = _both(0)
_LAST_TWO: gl.constexpr = _both(2)
_OF_TWO: gl.constexpr = gl.constexpr("=&r,=&r,r,r,r,r,r")


@gluon.jit
def packed_rows(codes, words, layout: gl.constexpr):
    """Codes of some rows, `[rows, 32]`, and their scales: of the first and third quarter, and of
    the others."""
    exponents = words.load(gl.SliceLayout(1, layout)) + _ADDED
    # A byte of the word is an exponent; bfloat16 has it from bit 7 on.
    even = (exponents << 7) & 0x7F807F80
    odd = (exponents >> 1) & 0x7F807F80
    return codes.load(layout), even[:, None], odd[:, None]


@gluon.jit
def numbers(packed, HALF: gl.constexpr):
    """Those of the first or last two quarters, divided by `DIVISOR`."""
    return gl.inline_asm_elementwise(
        _FIRST_TWO if HALF == 0 else _LAST_TWO,
        _OF_TWO,
        [packed[0], packed[1], packed[2]],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def packed_parts(codes, words, stage, SUB: gl.constexpr, PARTITION: gl.constexpr):
    """Of the 64 rows of a partition in each part of its unit, 32 elements of each quarter."""
    # Where tensor cores have them, in every other eight rows of a warp.
    places: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0], [32, 0]],
        [],
        [64, 32],
    )
    first = codes.index(4 * stage + 2 * PARTITION).slice(32 * SUB, 32, 1)
    second = codes.index(4 * stage + 2 * PARTITION + 1).slice(32 * SUB, 32, 1)
    of_first = words.index(4 * stage + SUB).slice(64 * PARTITION, 64, 0)
    of_second = words.index(4 * stage + 2 + SUB).slice(64 * PARTITION, 64, 0)
    return packed_rows(first, of_first, places), packed_rows(second, of_second, places)


@gluon.jit
def left_factors(parts, HALF: gl.constexpr, sums: gl.constexpr):
    """The numbers of two quarters, `[128, 32]`: a warp has eight rows of the first part, then the
    same eight of the second."""
    a, b = numbers(parts[0], HALF)
    c, d = numbers(parts[1], HALF)
    return _interleaved(a, c, sums), _interleaved(b, d, sums)


@gluon.jit
def _interleaved(first, second, sums: gl.constexpr):
    """Eight rows of one and eight of the other in turn, as a left factor."""
    both = gl.join(gl.reshape(first, [8, 8, 32]), gl.reshape(second, [8, 8, 32]))
    rows = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [128, 32])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, sums, 2), assert_trivial=True)
