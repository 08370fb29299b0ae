"""What one call of attention has to do: sizes, bytes and operations, without a tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True)
class Heads:
    """Those of Qwen3-8B and Llama 3 8B by default."""

    query: int = 32
    kv: int = 8
    dim: int = 128

    def __post_init__(self) -> None:
        if self.query % self.kv:
            raise ConfigError(
                f"--heads {self.query} cannot share --kv-heads {self.kv} evenly; give a multiple."
            )


@dataclass(frozen=True)
class Case:
    """Sequences of one length, each with `new` tokens behind `cached` ones."""

    kind: str
    sequences: int
    new: int
    cached: int

    @property
    def context(self) -> int:
        return self.new + self.cached

    def kv_bytes(self, heads: Heads, itemsize: int) -> int:
        """K and V of every token, read once."""
        return self.sequences * self.context * 2 * heads.kv * heads.dim * itemsize

    def operations(self, heads: Heads) -> int:
        """Two products with every position that a new token sees."""
        seen = self.new * self.cached + self.new * (self.new + 1) // 2
        return self.sequences * seen * 4 * heads.query * heads.dim

    def __str__(self) -> str:
        if self.kind == "decode":
            return f"decode {self.sequences} × {self.context:,}"
        behind = f" behind {self.cached:,}" if self.cached else ""
        return f"prefill {self.sequences} × {self.new:,}{behind}"


def read_case(kind: str, text: str) -> Case:
    """`64x4096` or `1x2048+30720`; a ValueError if it is neither."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:\+(\d+))?", text)
    if found is None:
        raise ValueError(text)
    sequences, tokens, more = (int(number or 0) for number in found.groups())
    if kind == "decode":
        return Case(kind, sequences, 1, tokens + more - 1)
    return Case(kind, sequences, tokens, more)
