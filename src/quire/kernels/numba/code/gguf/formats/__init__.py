"""How the blocks of each of GGUF's types become codes of a byte, scales and minima.

A step of a product goes over 32 activations. What it needs of a few rows, as many as a register has
lanes, is eight vectors, each with four neighbouring codes of every row, and the scales and minima:

    weight = scale * (code - offset) + minimum

Blocks of 256 are walked in chunks of a few steps each.
"""

from __future__ import annotations

from copy import copy

from quire.kernels.gguf_blocks import CODES
from quire.kernels.numba.code.gguf.formats.blocks_of_32 import (
    CodesApart,
    EightBits,
    FiveBits,
    FourBits,
)
from quire.kernels.numba.code.gguf.formats.format import Format
from quire.kernels.numba.code.gguf.formats.k_types import (
    FourOrFiveBitsK,
    SixBitsK,
    ThreeBitsK,
    TwoBitsK,
)
from quire.kernels.numba.code.gguf.formats.tables import Fp4, NonLinear, NonLinearK

_FORMATS = {
    each.name: each
    for each in (
        FourBits("Q4_0"),
        FourBits("Q4_1"),
        FiveBits("Q5_0"),
        FiveBits("Q5_1"),
        EightBits("Q8_0"),
        Fp4("MXFP4"),
        NonLinear("IQ4_NL"),
        NonLinearK("IQ4_XS"),
        TwoBitsK("Q2_K"),
        ThreeBitsK("Q3_K"),
        FourOrFiveBitsK("Q4_K"),
        FourOrFiveBitsK("Q5_K"),
        SixBitsK("Q6_K"),
        *map(CodesApart, CODES),
    )
}


def _coarse(format_: Format) -> Format:
    """The same beside activations of eight bits."""
    found = copy(format_)
    found.digits = 1
    return found


FORMATS: dict[str, Format] = {
    **_FORMATS,
    **{format_.block.coarse_name: _coarse(format_) for format_ in _FORMATS.values()},
}
