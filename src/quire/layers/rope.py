"""Rotary positions: pairs of a head's features are turned by an angle that grows with position.

Feature `i` is paired with `i + head_dim / 2`. With cosines and signed sines laid out over the
whole head, the turn is `x * cos + swap(x) * sin`, where `swap` exchanges the two halves:

    cos:  c0 c1 .. | c0 c1 ..        sin: -s0 -s1 .. | s0 s1 ..
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.plain import Rotation

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
FIRST_TABLE = 1024  # positions


@dataclass(frozen=True)
class RopeConfig:
    """How fast each pair of features turns. What a kind does not use stays at its default."""

    theta: float = 10_000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn: the length the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cosines and sines are scaled by it
    divisors: tuple[float, ...] = ()  # of each frequency, where a file brings them ready made


class RotaryEmbedding:
    """A table of cosines and sines by position, as long as it has had to be."""

    def __init__(self, head_dim: int, config: RopeConfig) -> None:
        self.head_dim = head_dim
        self.config = config
        self.table = torch.empty(0, 2, 1, head_dim, device="cpu")

    def __call__(self, positions: Tensor, limit: int, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at `positions`, all below `limit`."""
        self.reserve(limit, positions.device)
        rows = self.table[positions].to(dtype)
        return Rotation(rows[:, 0], rows[:, 1])

    def reserve(self, limit: int, device: torch.device) -> None:
        """Make the table cover positions below `limit`; it does not move until one is above."""
        if len(self.table) < limit or self.table.device != device:
            count = max(limit, 2 * len(self.table), FIRST_TABLE)
            self.table = self._build(count).to(device)

    def _build(self, count: int) -> Tensor:
        turns = inverse_frequencies(self.head_dim, self.config)
        angles = torch.arange(count, dtype=torch.float32, device="cpu")[:, None] * turns
        cos = angles.cos() * self.config.attention_factor
        sin = angles.sin() * self.config.attention_factor
        return torch.cat((cos, cos, -sin, sin), dim=-1).view(count, 2, 1, self.head_dim)


def inverse_frequencies(head_dim: int, config: RopeConfig) -> Tensor:
    """The angle each pair of features turns by from one position to the next."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    turns = 1.0 / (config.theta**exponents)
    if config.divisors:
        turns = turns / torch.tensor(config.divisors, dtype=torch.float32, device="cpu")
    if config.kind == "linear":
        return turns / config.factor
    if config.kind == "llama3":
        return _llama3(turns, config)
    if config.kind == "yarn":
        return _yarn(turns, config)
    return turns


def _llama3(turns: Tensor, config: RopeConfig) -> Tensor:
    """Slow pairs are slowed by `factor`, fast ones left alone, those between interpolated."""
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / turns
    rotations = config.original_positions / wavelengths
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * turns / config.factor + smooth * turns


def _yarn(turns: Tensor, config: RopeConfig) -> Tensor:
    """As llama3's, but interpolated evenly over the index of the pair."""
    dim = 2 * len(turns)

    def index_of(rotations: float) -> float:
        """The pair that makes this many rotations over the original length, as a real number."""
        length = config.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(len(turns), dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return turns / config.factor * ramp + turns * (1 - ramp)
