"""What one call of attention has to do: sizes, bytes and operations, without a tensor."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True)
class Heads:
    """Those of Qwen3-8B and Llama 3 8B by default."""

    query: int = 32
    kv: int = 8
    dim: int = 128
    rank: int | None = None  # of latents, which are K of all heads and, so many numbers of it, V

    def __post_init__(self) -> None:
        if self.query % self.kv:
            raise ConfigError(
                f"--heads {self.query} cannot share --kv-heads {self.kv} evenly; give a multiple."
            )

    @classmethod
    def of_deepseek(cls, query: int) -> Heads:
        """As many as are given over latents of 512 numbers and 64 rotated ones."""
        return cls(query, 1, 576, rank=512)

    @property
    def cached(self) -> int:
        """Numbers of a token."""
        return 2 * self.kv * self.dim if self.rank is None else self.dim

    @property
    def multiplied(self) -> int:
        """Numbers of K and V that a query head is multiplied with, for each position."""
        return self.dim + (self.dim if self.rank is None else self.rank)


@dataclass(frozen=True)
class Case:
    """Sequences, each with `new` tokens behind `cached` ones, or behind fewer.

    With `least`, their lengths are spread evenly from that to the longest, in a random order.
    """

    kind: str
    sequences: int
    new: int
    cached: int
    least: int | None = None

    @property
    def context(self) -> int:
        """The longest."""
        return self.new + self.cached

    @property
    def contexts(self) -> list[int]:
        if self.least is None:
            return [self.context] * self.sequences
        more, gaps = self.context - self.least, max(1, self.sequences - 1)
        lengths = [self.context - more * i // gaps for i in range(self.sequences)]
        random.Random(0).shuffle(lengths)
        return lengths

    def kv_bytes(
        self, heads: Heads, itemsize: int, window: int | None = None, block_size: int = 1
    ) -> int:
        """K and V of every token that is seen, read once; with a window, of each block it touches.

        A prefill's new tokens have windows of their own: together they reach from the first's.
        """
        tokens = 0
        for context in self.contexts:
            first = 0 if window is None else max(0, context - self.new + 1 - window)
            tokens += context - first // block_size * block_size
        return tokens * heads.cached * itemsize

    def operations(self, heads: Heads, window: int | None = None) -> int:
        """Two products with every position that a new token sees."""
        seen = sum(
            positions_seen(context - self.new, self.new, window) for context in self.contexts
        )
        return seen * 2 * heads.query * heads.multiplied

    def __str__(self) -> str:
        if self.kind == "decode":
            least = "" if self.least is None else f"{self.least:,} to "
            return f"decode {self.sequences} × {least}{self.context:,}"
        behind = f" behind {self.cached:,}" if self.cached else ""
        return f"prefill {self.sequences} × {self.new:,}{behind}"


def positions_seen(cached: int, new: int, window: int | None) -> int:
    """How many positions `new` tokens see in all: each one more than the last, until the window."""
    growing = new if window is None else min(new, max(0, window - cached))
    seen = growing * cached + growing * (growing + 1) // 2
    return seen + (new - growing) * (window or 0)


def read_case(kind: str, text: str) -> Case:
    """`64x4096` or `1x2048+30720`, or decodes of `154x620-1544`; a ValueError if it is neither."""
    if kind == "decode" and (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)-([1-9]\d*)", text)):
        sequences, least, most = map(int, found.groups())
        if least > most:
            raise ValueError(text)
        return Case(kind, sequences, 1, most - 1, least)
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:\+(\d+))?", text)
    if found is None:
        raise ValueError(text)
    sequences, tokens, more = (int(number or 0) for number in found.groups())
    if kind == "decode":
        return Case(kind, sequences, 1, tokens + more - 1)
    return Case(kind, sequences, tokens, more)
