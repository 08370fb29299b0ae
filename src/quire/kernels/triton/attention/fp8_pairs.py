"""KV in fp8 on its way to tensor cores: loaded as pairs of neighbouring dimensions.

There is no instruction that turns a tile of bytes around, as V has to be, so bytes would be fetched
one by one. Words of 16 bits are turned like any half precision, and split afterwards: the low byte
is an even dimension, the high byte the odd one after it. So a tile comes as two, one of the even
dimensions and one of the odd; q is loaded alike, and so are results until they are whole again.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import is_fp8

# Four bytes to two pairs of float16, the low bytes of the pairs and the high ones.
_CONVERT: tl.constexpr = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# The least exponent that is told apart, as float32 holds it: 2 ** -60.
_LEAST: tl.constexpr = tl.constexpr(127 - 60)


def as_pairs(pages: Tensor) -> Tensor:
    """Pages in fp8 as pairs, half as many as there are dimensions; others as they are."""
    return pages.view(torch.int16) if is_fp8(pages) else pages


@memoise
def has_conversion(device: torch.device) -> bool:
    """Whether there is an instruction for it. Triton's own conversion gives the same numbers."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def even_and_odd(pairs, dtype: tl.constexpr, CONVERTS: tl.constexpr):
    """The numbers in the low and in the high bytes."""
    if CONVERTS:
        even, odd = tl.inline_asm_elementwise(
            _CONVERT,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        odd = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return even.to(dtype), odd.to(dtype)


@triton.jit
def split_scale(scale):
    """The power of two in each scale, its inverse, and what is left: `left * 2 ** power`."""
    exponent = tl.maximum(scale.to(tl.int32, bitcast=True) >> 23, _LEAST)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, scale * inverse
