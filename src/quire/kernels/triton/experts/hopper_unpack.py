"""From MXFP4 codes in shared memory to left factors of tensor cores, by the instructions of
`unpack.py`, whose functions are Triton's; these are Gluon's."""

from __future__ import annotations

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.experts import unpack

# What a scale has more than its exponent, for each of the four in a word.
_ADDED: gl.constexpr = gl.constexpr(unpack.IN_SCALES.value * 0x01010101)


def _of_quarter(quarter: int, asm: str) -> str:
    """Its operands among those of all four: results, codes, and scales, each twice."""
    names = {"0": f"${quarter}", "1": "$4", "2": f"${5 + 2 * quarter}"}
    return re.sub(r"\$(\d)", lambda found: names[found[1]], asm)


_EACH = (unpack.FIRST, unpack.SECOND, unpack.THIRD, unpack.FOURTH)
_QUARTERS: gl.constexpr = gl.constexpr(
    "\n".join(_of_quarter(i, asm.value) for i, asm in enumerate(_EACH))
)
_OF_QUARTERS: gl.constexpr = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@gluon.jit
def quarters(codes, words, stage, piece: gl.constexpr, sums: gl.constexpr):
    """The numbers of four quarters `[64, 32]`, divided by `DIVISOR`, where tensor cores take a left
    factor from."""
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    found = codes.index(4 * stage + piece).load(left)
    its_words = words.index(4 * stage + piece).load(gl.SliceLayout(1, left)) + _ADDED
    return gl.inline_asm_elementwise(
        _QUARTERS,
        _OF_QUARTERS,
        [found, _scale(its_words, 0), _scale(its_words, 1), _scale(its_words, 2),
         _scale(its_words, 3)],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _scale(words, QUARTER: gl.constexpr):
    """The scale of a quarter, twice side by side: a byte of the word is its exponent."""
    asm: gl.constexpr = scale_asm(QUARTER)
    found = gl.inline_asm_elementwise(asm, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)
    return found[:, None]


@gluon.constexpr_function
def scale_asm(quarter):
    return f"prmt.b32 $0, $1, 0, 0x{quarter}4{quarter}4;\nshr.b32 $0, $0, 1;"


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
def packed_rows(codes, words, stage, SUB: gl.constexpr, WARPGROUP: gl.constexpr):
    """32 elements of each quarter, of the 32 rows of a warpgroup in both parts: codes and scales of
    one part, then of the other."""
    found, even, odd = _packed_part(codes, words, stage, 0, SUB, WARPGROUP)
    found_2, even_2, odd_2 = _packed_part(codes, words, stage, 1, SUB, WARPGROUP)
    return found, even, odd, found_2, even_2, odd_2


@gluon.jit
def left_factors(packed, HALF: gl.constexpr, sums: gl.constexpr):
    """The numbers of the first or last two quarters `[64, 32]`, divided by `DIVISOR`; a warp has
    eight rows of the first part, then the same eight of the second."""
    asm: gl.constexpr = _FIRST_TWO if HALF == 0 else _LAST_TWO
    a, b = _numbers(packed[0], packed[1], packed[2], asm)
    c, d = _numbers(packed[3], packed[4], packed[5], asm)
    return _interleaved(a, c, sums), _interleaved(b, d, sums)


@gluon.jit
def _packed_part(
    codes, words, stage, PART: gl.constexpr, SUB: gl.constexpr, WARPGROUP: gl.constexpr
):
    # Where tensor cores have them, in every other eight rows of a warp.
    places: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, 32],
    )
    found = codes.index(2 * stage + PART).slice(32 * WARPGROUP, 32, 0).slice(32 * SUB, 32, 1)
    its_words = words.index(4 * stage + 2 * PART + SUB).slice(32 * WARPGROUP, 32, 0)
    exponents = its_words.load(gl.SliceLayout(1, places)) + _ADDED
    # A byte of the word is an exponent; bfloat16 has it from bit 7 on.
    even = (exponents << 7) & 0x7F807F80
    odd = (exponents >> 1) & 0x7F807F80
    return found.load(places), even[:, None], odd[:, None]


@gluon.jit
def _numbers(found, even, odd, asm: gl.constexpr):
    return gl.inline_asm_elementwise(
        asm,
        _OF_TWO,
        [found, even, odd],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _interleaved(first, second, sums: gl.constexpr):
    """Eight rows of one and eight of the other in turn, as a left factor."""
    both = gl.join(gl.reshape(first, [4, 8, 32]), gl.reshape(second, [4, 8, 32]))
    rows = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [64, 32])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, sums, 2), assert_trivial=True)
