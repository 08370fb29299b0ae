"""Randomness without state: a number in (0, 1) from a seed and a position, and nothing else.

A sequence's k-th draw depends on its own seed and k only, so it is the same beside any
neighbours, after preemption, and on every platform. The mixing is that of SplitMix64, whose
output passes the usual batteries of tests for a plain counter as input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: successive counters lie far apart
_SAMPLE_STREAM = np.uint64(0xD1B54A32D192ED03)  # keeps derived seeds apart from drawn numbers


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in the open interval (0, 1) for each seed and position."""
    return unit_interval(_mix(_mix(_words(seeds)) + _STRIDE * _words(positions)))


def unit_interval(words: Words) -> npt.NDArray[np.float64]:
    """Random words as numbers in the open interval (0, 1)."""
    # 52 bits and a half: neither end of the interval can be reached by rounding.
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample_seed(seed: int, sample: int) -> int:
    """The seed of a request's `sample`-th sequence; any 64-bit `seed` will do, signed or not."""
    word = _mix(_mix(_words([seed]) ^ _SAMPLE_STREAM) + _STRIDE * _words([sample]))
    return int(word[0])


def _words(values: Sequence[int]) -> Words:
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def _mix(words: Words) -> Words:
    """The SplitMix64 step: every bit of the input reaches every bit of the output."""
    words = words + _STRIDE
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
