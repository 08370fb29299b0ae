"""Sizes of grids and blocks, computed on the host.

Triton's own functions of these names are made for kernels, too, and take ten times as long: in all,
a sixth of the host's time for a layer.
"""

from __future__ import annotations


def cdiv(number: int, size: int) -> int:
    """How many pieces of this size it takes."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
