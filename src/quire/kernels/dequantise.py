"""From codes and scales back to numbers: the plain reference of every quantised format.

All of it is in float32, on any device, without a synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

E8M0_BIAS = 127
E8M0_NAN = 255
HALF_OF_SMALLEST = 1 << 22  # the bits of 2 ** -127, which float32 has only as a subnormal
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of fp4; with its top bit, negative


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes `[…, n]` to codes `[…, 2 n]`: the lower half of a byte is the first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `unpack_nibbles`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def spread(scales: Tensor, size: int, columns: int) -> Tensor:
    """One scale for each `size` columns to one for each column; the last group may be shorter."""
    repeated = scales.unsqueeze(-1).expand(*scales.shape, size)
    return repeated.flatten(-2)[..., :columns]


def from_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, middle: int) -> Tensor:
    """Unsigned codes whose zero is `middle`, or has a code of its own; all of one shape."""
    zero = middle if zeros is None else zeros.float()
    return (codes.float() - zero) * scales.float()


def from_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes of four bits, E2M1: a sign, two bits of exponent, one of fraction."""
    # Arithmetic instead of a table, which would have to be copied to the device first.
    exponent, fraction = (codes >> 1) & 3, codes & 1
    quarters = torch.where(exponent == 0, fraction * 2, (fraction + 2) << exponent)
    size = quarters.float() * 0.25
    return torch.where(codes >= 8, -size, size) * scales


def from_e8m0(exponents: Tensor) -> Tensor:
    """A byte that is a power of two: 127 is 1."""
    bits = exponents.int() << 23  # where float32 has its exponent, with the same bias
    return torch.where(exponents == 0, HALF_OF_SMALLEST, bits).view(torch.float32)
