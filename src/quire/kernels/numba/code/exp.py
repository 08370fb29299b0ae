"""The exponential of SIMD vectors; left to a library it would be one call for each lane."""

from __future__ import annotations

from numba.extending import intrinsic
from numpy import float32

from quire.kernels.numba.code.memory import helper
from quire.kernels.numba.code.simd import FLOATS, WORDS, larger, splat, vector
from quire.kernels.numba.sizes import LANES

# Adding this leaves no bits for a fraction: a number is rounded, to the nearest integer.
ROUND = float32(1.5 * 2**23)

LOWEST = float32(-87.0)  # the exponential of less is no normal number


@helper
def exp(x):
    """The exponential of numbers that are not above zero; 0 below `LOWEST`.

    As ever: `exp(x) = 2**n * exp(r)` with n an integer and r small, by the polynomial of Cephes.
    """
    bounded = larger(x, splat(LOWEST))
    power = bounded * float32(1.44269504) + ROUND
    n = power - ROUND
    r = bounded - n * float32(0.693359375) + n * float32(2.12194440e-4)
    p = r * float32(1.9875691500e-4) + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    p = p * (r * r) + r + float32(1.0)
    return _zero_below_lowest(x, _scale_by_power(p, power))


@intrinsic
def _scale_by_power(typing_context, values, power):
    """`values * 2**n`, where `power` is n plus `ROUND`, so that its lowest bits are n."""

    def generate(context, builder, signature, arguments):
        words = builder.bitcast(arguments[1], WORDS)
        exponent = builder.shl(builder.add(words, WORDS([127] * LANES)), WORDS([23] * LANES))
        return builder.fmul(arguments[0], builder.bitcast(exponent, FLOATS))

    return vector(vector, vector), generate


@intrinsic
def _zero_below_lowest(typing_context, x, values):
    def generate(context, builder, signature, arguments):
        is_below = builder.fcmp_ordered("olt", arguments[0], FLOATS([float(LOWEST)] * LANES))
        return builder.select(is_below, FLOATS(None), arguments[1])

    return vector(vector, vector), generate
