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
